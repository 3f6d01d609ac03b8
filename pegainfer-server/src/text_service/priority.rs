//! Priority of threads with long work.

/// Lowers the priority of the calling thread, so that serving threads run first.
#[cfg(target_os = "linux")]
pub fn lower_priority() {
    // On Linux this changes only the calling thread. A failure only affects speed.
    let _ = rustix::process::nice(5);
}

/// Does nothing: only Linux has per-thread priorities.
#[cfg(not(target_os = "linux"))]
pub fn lower_priority() {}
