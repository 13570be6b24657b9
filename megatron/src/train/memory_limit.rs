//! How much memory the processes of this machine, or of this one's control group, can have.

use std::fs;
use std::path::{Path, PathBuf};

/// A limit in bytes, and what sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    pub bytes: u64,
    pub by: &'static str,
}

/// The smallest limit that holds for this process; none where the system tells nothing.
pub fn memory_limit() -> Option<MemoryLimit> {
    limit_under(Path::new("/"))
}

/// As [`memory_limit`], of a system whose files lie under `root`.
fn limit_under(root: &Path) -> Option<MemoryLimit> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let physical =
        kib(&meminfo, "MemTotal:").map(|bytes| MemoryLimit { bytes, by: "physical memory" });
    let group =
        group_limits(root).min().map(|bytes| MemoryLimit { bytes, by: "the limit of the cgroup" });
    physical.into_iter().chain(group).min_by_key(|limit| limit.bytes)
}

/// The value of a line such as `MemTotal:    1234 kB` in bytes.
pub(super) fn kib(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    let number: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

/// The limits of this process's control groups and of the groups around them, in both versions.
fn group_limits(root: &Path) -> impl Iterator<Item = u64> {
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut files = Vec::new();
    for line in groups.lines() {
        // number:controllers:path; version 2 has number 0 and names no controllers.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (name, file) = match controllers {
            "" => ("cgroup2", "memory.max"),
            list if list.split(',').any(|controller| controller == "memory") => {
                ("cgroup", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        for mount in mounts.lines().filter_map(|line| Mount::of(line, name)) {
            // A container may see a part of the tree alone, and its own group by its path outside.
            let within = Path::new(path).strip_prefix(&mount.root).unwrap_or(Path::new(""));
            let top = root.join(mount.at.strip_prefix("/").unwrap_or(&mount.at));
            files.extend(within.ancestors().map(|group| top.join(group).join(file)));
        }
    }
    // `max`, or next to the largest number, is no limit.
    files.into_iter().filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
}

/// Where a tree of control groups is seen.
struct Mount {
    /// The group that is seen at its top.
    root: PathBuf,
    at: PathBuf,
}

impl Mount {
    /// A line of `mountinfo`, if it is of a file system `kind` that has the controller of memory.
    fn of(line: &str, kind: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let is_kind = after.next()? == kind;
        let has_memory =
            kind == "cgroup2" || after.nth(1)?.split(',').any(|option| option == "memory");
        let mut places = before.split(' ').skip(3);
        let (root, at) = (places.next()?.into(), places.next()?.into());
        (is_kind && has_memory).then_some(Self { root, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A system with 16 GiB and these files.
    fn limit(files: &[(&str, &str)]) -> Option<MemoryLimit> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in
            [("proc/meminfo", "MemFree: 1 kB\nMemTotal:       16777216 kB\n")].iter().chain(files)
        {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        limit_under(folder.path())
    }

    const V2: &str = "30 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
    const V1: &str = "31 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

    #[test]
    fn without_control_groups_it_is_the_machines_memory() {
        let physical = Some(MemoryLimit { bytes: 16 * GIB, by: "physical memory" });
        assert_eq!(limit(&[]), physical);
        let unlimited = [
            ("proc/self/cgroup", "0::/job"),
            ("proc/self/mountinfo", V2),
            ("sys/fs/cgroup/job/memory.max", "max\n"),
        ];
        assert_eq!(limit(&unlimited), physical);
        let unlimited = [
            ("proc/self/cgroup", "4:memory:/job"),
            ("proc/self/mountinfo", V1),
            ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(limit(&unlimited), physical);
        assert_eq!(limit_under(Path::new("/none")), None);
    }

    #[test]
    fn the_smallest_limit_of_a_group_and_those_around_it_counts() {
        let by_group =
            |gib: u64| Some(MemoryLimit { bytes: gib * GIB, by: "the limit of the cgroup" });
        let of_v2 = |own: &str, around: &str| {
            limit(&[
                ("proc/self/cgroup", "0::/slurm/job/step"),
                ("proc/self/mountinfo", V2),
                ("sys/fs/cgroup/slurm/job/step/memory.max", own),
                ("sys/fs/cgroup/slurm/job/memory.max", around),
            ])
        };
        assert_eq!(of_v2("max", "4294967296"), by_group(4));
        assert_eq!(of_v2("3221225472", "4294967296"), by_group(3));
        let of_v1 = limit(&[
            ("proc/self/cgroup", "5:cpu,cpuacct:/\n4:hugetlb,memory:/slurm/job\n0::/"),
            ("proc/self/mountinfo", V1),
            ("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "2147483648"),
            ("sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes", "9223372036854771712"),
        ]);
        assert_eq!(of_v1, by_group(2));
    }

    #[test]
    fn a_container_sees_its_own_group_at_the_top() {
        let mounts = "35 31 0:32 /docker/1a2b /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        for path in ["/docker/1a2b", "/elsewhere/1a2b"] {
            let found = limit(&[
                ("proc/self/cgroup", &format!("4:memory:{path}")),
                ("proc/self/mountinfo", mounts),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824"),
            ]);
            assert_eq!(found.unwrap().bytes, GIB, "{path}");
        }
    }
}
