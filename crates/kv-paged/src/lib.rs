//! Planner of a paged key-value cache: block tables, layouts, sequences, sharing.
