"""Shipped recipes: each public function returns a `Run`."""
