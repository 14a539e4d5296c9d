"""vLLM's HTTP routes, one module per group. Which of them exist depends on flags and variables: `table.py`."""
