//! The memory limit of this machine, or of this process's control group.

use std::fs;
use std::path::{Path, PathBuf};

/// A limit in bytes and its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    pub bytes: u64,
    pub by: &'static str,
}

/// The smallest limit that applies to this process; `None` if the system reports nothing.
pub fn memory_limit() -> Option<MemoryLimit> {
    limit_under(Path::new("/"))
}

/// As [`memory_limit`], with the system's files under `root`.
fn limit_under(root: &Path) -> Option<MemoryLimit> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let physical =
        kib(&meminfo, "MemTotal:").map(|bytes| MemoryLimit { bytes, by: "physical memory" });
    let group =
        group_limits(root).min().map(|bytes| MemoryLimit { bytes, by: "the limit of the cgroup" });
    physical.into_iter().chain(group).min_by_key(|limit| limit.bytes)
}

/// The value of a line such as `MemTotal:    1234 kB`, in bytes.
pub(super) fn kib(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    let number: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

/// The limits of this process's control groups and of all their parents, for cgroup versions 1 and
/// 2.
fn group_limits(root: &Path) -> impl Iterator<Item = u64> {
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut files = Vec::new();
    for line in groups.lines() {
        // number:controllers:path. Version 2 has number 0 and an empty list of controllers.
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
            // A container may see only a part of the tree, while its own group has the path outside
            // the container.
            let within = Path::new(path).strip_prefix(&mount.root).unwrap_or(Path::new(""));
            let top = root.join(mount.at.strip_prefix("/").unwrap_or(&mount.at));
            files.extend(within.ancestors().map(|group| top.join(group).join(file)));
        }
    }
    // `max`, or a value close to the largest number, means no limit.
    files.into_iter().filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
}

/// The mount point of a control group hierarchy.
struct Mount {
    /// The group at the top of the mount.
    root: PathBuf,
    at: PathBuf,
}

impl Mount {
    /// Parses a line of `mountinfo`. Returns a mount only for a file system of type `kind` with the
    /// memory controller.
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

    /// The limit on a system with 16 GiB and these files.
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
