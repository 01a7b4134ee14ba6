//! The decode step of a language model as a function of a plan: recorded once, captured as one graph, replayed.
