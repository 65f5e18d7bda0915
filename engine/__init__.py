"""Who runs when: requests, blocks, steps, and the processes that execute them."""

import os

# Threads of a CPU's operations wait asleep, not spinning. A step has hundreds of short parallel regions; beside other
# busy processes a spinning thread burns the time slice its partner needs: on two loaded cores that made the demo 70 times
# slower. OpenMP reads this when torch loads it, so it must be set before; a value from outside wins.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
