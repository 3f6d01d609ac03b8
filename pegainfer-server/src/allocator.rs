//! Tuning of glibc's allocator for a long-lived server with many threads; does nothing on other systems.

/// Number of arenas, shared by all threads.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ARENAS: libc::c_int = 2;
/// Size from which a block is a mapping of its own, which goes back to the system when it is freed: bodies and responses of
/// megabytes. Without it, glibc raises the size with each such block that is freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED: libc::c_int = 1 << 20;

/// Limits the number of arenas, so that memory freed by one thread can be reused by others: glibc's default is up to eight
/// arenas a core, each of which keeps what its threads freed. Saves about 15 of 760 MB under load on 16 cores. Small blocks
/// are not affected: they stay in per-thread caches.
pub fn configure() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the calls have no preconditions. If they fail, more memory is kept.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
    }
}

/// Returns freed memory to the system.
pub fn return_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call has no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}
