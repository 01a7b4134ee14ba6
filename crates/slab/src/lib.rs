//! A checkpointed bump allocator over one device allocation.
