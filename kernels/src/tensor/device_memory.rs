//! A GPU's total, used and free memory.

use std::fmt;

/// A GPU's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Held by tensors of this process.
    pub used: u64,
    /// Taken by the process for its tensors; freed memory is kept for the next ones.
    pub reserved: u64,
    /// The largest `used` so far.
    pub peak_used: u64,
    /// The largest `reserved` so far.
    pub peak_reserved: u64,
    /// Free on the device.
    pub free: u64,
    /// Total of the device.
    pub total: u64,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
        let Self { used, reserved, free, total, .. } = *self;
        let kept = gib(reserved.saturating_sub(used));
        write!(
            f,
            "{} of {} are free, tensors of this process hold {}, its pool keeps {kept} more",
            gib(free),
            gib(total),
            gib(used)
        )
    }
}
