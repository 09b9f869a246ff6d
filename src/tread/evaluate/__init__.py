"""How good a set of images is: Frechet distances, precision and recall, kernel distance, Inception Score."""
