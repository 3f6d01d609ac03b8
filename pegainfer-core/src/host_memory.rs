//! Memory available to this process.

use std::fs;
use std::path::Path;

/// Bytes that can be allocated without swapping: of the machine, or of the process's cgroup (version 2) if that has
/// less, as in a container. `None` if the system does not say.
pub fn available() -> Option<u64> {
    let machine = meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    Some(cgroup(Path::new("/sys/fs/cgroup")).map_or(machine, |left| left.min(machine)))
}

/// `MemAvailable` of /proc/meminfo, in KiB there.
fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Bytes below the limit of the cgroup at `root`; `None` without a limit. Inside a container, its own cgroup is the
/// root.
fn cgroup(root: &Path) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(root.join(file)).ok()?.trim().parse::<u64>().ok();
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_line_is_read() {
        assert_eq!(meminfo("MemTotal: 100 kB\nMemAvailable:   42 kB\n"), Some(42 << 10));
        assert_eq!(meminfo("MemTotal: 100 kB\n"), None);
    }

    #[test]
    fn a_cgroup_without_a_limit_has_none() {
        let root = std::env::temp_dir().join(format!("pegainfer-cgroup-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("memory.current"), "30\n").unwrap();
        fs::write(root.join("memory.max"), "max\n").unwrap();
        assert_eq!(cgroup(&root), None);
        fs::write(root.join("memory.max"), "100\n").unwrap();
        assert_eq!(cgroup(&root), Some(70));
        fs::remove_dir_all(&root).unwrap();
    }
}
