//! Memory available to this process.

use std::fs;
use std::path::Path;

/// Bytes that can be allocated without swapping: of the machine, or of the process's cgroup (version 2) if that has
/// less, as in a container. `None` if the system does not say.
pub fn available() -> Option<u64> {
    let machine = meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    Some(cgroup(Path::new("/sys/fs/cgroup")).map_or(machine, |left| left.min(machine)))
}

/// Bytes of memory and swap space together, within the limit of the process's cgroup (version 2). `None` if the system
/// does not say.
pub fn total() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let machine = meminfo(&text, "MemTotal:")? + meminfo(&text, "SwapTotal:").unwrap_or(0);
    Some(limit(Path::new("/sys/fs/cgroup")).map_or(machine, |limit| limit.min(machine)))
}

/// A line of /proc/meminfo in bytes; the file has KiB.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// The limit of the cgroup at `root`, memory and swap space together; `None` without one.
fn limit(root: &Path) -> Option<u64> {
    Some(number(root, "memory.max")? + number(root, "memory.swap.max").unwrap_or(0))
}

fn number(root: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(root.join(file)).ok()?.trim().parse().ok()
}

/// Bytes below the limit of the cgroup at `root`; `None` without a limit. Inside a container, its own cgroup is the
/// root.
fn cgroup(root: &Path) -> Option<u64> {
    Some(number(root, "memory.max")?.saturating_sub(number(root, "memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_by_its_name() {
        assert_eq!(meminfo("MemTotal: 100 kB\nMemAvailable:   42 kB\n", "MemAvailable:"), Some(42 << 10));
        assert_eq!(meminfo("MemTotal: 100 kB\n", "MemAvailable:"), None);
    }

    #[test]
    fn all_of_the_memory_is_more_than_what_is_available() {
        assert!(total() >= available(), "{:?} {:?}", total(), available());
    }

    #[test]
    fn a_cgroup_without_a_limit_has_none() {
        let root = std::env::temp_dir().join(format!("pegainfer-cgroup-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("memory.current"), "30\n").unwrap();
        fs::write(root.join("memory.max"), "max\n").unwrap();
        assert_eq!((cgroup(&root), limit(&root)), (None, None));
        fs::write(root.join("memory.max"), "100\n").unwrap();
        assert_eq!((cgroup(&root), limit(&root)), (Some(70), Some(100)));
        fs::remove_dir_all(&root).unwrap();
    }
}
