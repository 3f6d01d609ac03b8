//! Free space of the disk that holds a directory.

use std::path::Path;

/// Bytes that this user may still write to `dir`, or to the first of its parents that exists; `None` if the system does
/// not say.
pub(super) fn free_bytes(dir: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let disk = dir.ancestors().find_map(|dir| {
            let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
            rustix::fs::statvfs(dir).ok()
        })?;
        disk.f_bavail.checked_mul(disk.f_frsize)
    }
    #[cfg(not(unix))]
    {
        let _ = dir;
        None
    }
}
