//! How the memory of tensors is reused between steps.

/// Keeps the memory of dropped tensors in this process for the next ones. A training step allocates and drops the same sizes over
/// and over; by default glibc gives blocks above 32 MiB back to the system at once, and each comes back page by page, zeroed.
///
/// For processes that train: the peak stays, but nothing is returned after it. Does nothing where the allocator is not glibc's.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: mallopt only sets parameters of malloc, under its lock.
        unsafe {
            libc::mallopt(libc::M_MMAP_MAX, 0);
            libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
        }
    }
}
