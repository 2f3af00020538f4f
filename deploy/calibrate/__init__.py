"""`tercet calibrate`: fits the settings of predictions on texts or to feedback."""
