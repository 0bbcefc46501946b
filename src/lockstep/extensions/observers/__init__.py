"""Extensions that observe values of the run: learning rates, gradients, parameters and speed."""
