"""What makes a step fast."""
