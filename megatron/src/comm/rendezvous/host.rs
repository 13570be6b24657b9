//! Which machine this is.

use std::fs;

fn first_line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.lines().next()?.trim().to_owned()).filter(|line| !line.is_empty())
}

/// The machine's name.
pub fn name() -> String {
    first_line("/proc/sys/kernel/hostname").unwrap_or_else(|| "localhost".into())
}

/// Equal for two processes that can see each other in `/proc`: one kernel, one pid namespace.
pub(crate) fn identity() -> String {
    let boot = first_line("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let pids = fs::read_link("/proc/self/ns/pid").map(|link| link.display().to_string()).unwrap_or_default();
    format!("{boot} {pids}")
}
