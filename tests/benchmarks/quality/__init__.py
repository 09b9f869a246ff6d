"""The quality experiment at tiny size: it trains what the product trains, and its figures are the product's."""
