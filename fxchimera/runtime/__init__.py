"""Effects: replicas of stages, the messages between ranks, and the executor that runs an order on both."""
