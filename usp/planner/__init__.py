"""The planner: time and memory of every choice of degrees, predicted from the schedule that the ring executes."""
