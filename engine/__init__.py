"""Who runs when: requests, blocks, steps, and the processes that execute them."""
