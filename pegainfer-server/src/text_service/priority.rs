//! Priority of threads with long work.

/// Lowers the priority of the calling thread, so that those that serve run first.
#[cfg(target_os = "linux")]
pub fn lower_priority() {
    // On Linux this changes the calling thread only. A failure changes nothing but the speed.
    let _ = rustix::process::nice(5);
}

/// Does nothing: only Linux has priorities of single threads.
#[cfg(not(target_os = "linux"))]
pub fn lower_priority() {}
