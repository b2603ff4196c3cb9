"""Lightning trainings that go on when workers are lost or come."""
