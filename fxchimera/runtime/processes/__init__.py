"""The processes that take part, how they find each other, and what they tell each other outside of messages."""
