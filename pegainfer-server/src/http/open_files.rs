//! How many connections the operating system allows.

/// Lets this process have as many open files as the system allows, up to 65,536: each connection is one, and the usual
/// limit of 1,024 is less than a load balancer keeps open.
#[cfg(unix)]
pub fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // Some systems report no maximum and refuse one.
    let wanted = maximum.unwrap_or(u64::MAX).min(1 << 16);
    if current.is_some_and(|current| current < wanted)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
    {
        log::warn!("the limit of open files cannot be raised, many connections may fail (ulimit -n): {error}");
    }
}

/// There is no such limit here.
#[cfg(not(unix))]
pub fn raise_open_files() {}
