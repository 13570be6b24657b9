//! Placeholder module; filled by the commits that follow.
