//! A directory that is removed at the end of a test.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A new directory inside the system's temporary directory.
pub struct TempDir(pub PathBuf);

impl TempDir {
    /// A new, empty directory; `name` tells a reader whose it is.
    pub fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pegainfer-test-{name}-{}-{count}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
