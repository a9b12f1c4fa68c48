"""Programs for people who work on burst_plugin; nothing of them is installed."""
