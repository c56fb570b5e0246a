"""One rank's failure is every rank's error: how it is noticed, told and written down."""
