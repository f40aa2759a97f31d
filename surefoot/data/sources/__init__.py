"""Where text comes from: one file per source."""
