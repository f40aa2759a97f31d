"""What a layout costs before it runs: communication in closed form."""
