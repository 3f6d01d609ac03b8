//! Raises the limit of open files, and with it the limit of connections.

/// Raises this process's limit of open files to the system's maximum, at most 65,536. Each connection is an open file,
/// and the usual limit of 1,024 is less than a load balancer keeps open.
#[cfg(unix)]
pub fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // Some systems report no maximum and refuse to set an unlimited one.
    let target = maximum.unwrap_or(u64::MAX).min(1 << 16);
    if current.is_some_and(|current| current < target)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(target), maximum })
    {
        log::warn!("the limit of open files cannot be raised, many connections may fail (ulimit -n): {error}");
    }
}

/// Does nothing: other systems have no such limit.
#[cfg(not(unix))]
pub fn raise_open_files() {}

/// Number of files needed for everything except connections: the model, the log, the runtime, traces.
pub const OTHER_FILES: usize = 64;

/// Maximum number of open files of the process.
#[cfg(unix)]
pub fn max_open_files() -> usize {
    use rustix::process::{Resource, getrlimit};
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok());
    files.unwrap_or(usize::MAX)
}

/// Other systems have no such limit.
#[cfg(not(unix))]
pub fn max_open_files() -> usize {
    usize::MAX
}

/// Maximum number of connections without a flag: at most 8192, fewer if the limit of open files allows no more.
pub fn default_max_connections() -> usize {
    max_open_files().saturating_sub(OTHER_FILES).clamp(1, 8192)
}
