//! Tuning of glibc's allocator for a long-lived server with many threads; does nothing on other systems.

/// Number of arenas, shared by all threads.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ARENAS: libc::c_int = 2;

/// Limits the number of arenas, so that memory freed by one thread can be reused by others: glibc's default is up to eight
/// arenas a core, each of which keeps what its threads freed. Saves about 15 of 760 MB under load on 16 cores. Small blocks
/// are not affected: they stay in per-thread caches.
pub fn few_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call has no preconditions. If it fails, there are more arenas.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
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
