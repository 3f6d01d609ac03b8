//! Small files with keys or a certificate, read at the start and again on SIGHUP.

use anyhow::{Result, ensure};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::Path;

/// Maximum size: 100,000 keys, or a hundred times the longest certificate chain.
const MAX_BYTES: u64 = 16 << 20;

/// Bytes of a regular file.
///
/// # Errors
/// The file cannot be opened, has more than 16 MiB, or is not a regular file. A pipe would block the server until
/// somebody writes, and its bytes cannot be read again.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let file = open(path)?;
    ensure!(
        file.metadata()?.is_file(),
        "it is not a regular file: a pipe, device or folder cannot be read again on SIGHUP"
    );
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= MAX_BYTES, "it has more than {} MiB", MAX_BYTES >> 20);
    Ok(bytes)
}

/// Opens a file. Opening a pipe without a writer does not wait.
#[cfg(unix)]
fn open(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let no_wait = rustix::fs::OFlags::NONBLOCK.bits();
    OpenOptions::new().read(true).custom_flags(no_wait.cast_signed()).open(path)
}

#[cfg(not(unix))]
fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::TempDir;

    #[test]
    fn only_small_regular_files_are_read() {
        let dir = TempDir::new("secret-file");
        let path = dir.path().join("keys");
        let error = |path: &Path| format!("{:#}", read(path).unwrap_err());
        assert!(error(&path).contains("No such file"), "{}", error(&path));
        std::fs::write(&path, "key").unwrap();
        assert_eq!(read(&path).unwrap(), b"key");
        File::options().write(true).open(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert_eq!(error(&path), "it has more than 16 MiB");
        assert!(error(dir.path()).contains("not a regular file"));
        let endless = Path::new("/dev/zero");
        assert!(!endless.exists() || error(endless).contains("not a regular file"));
    }

    /// Uses a pipe without a writer, which a plain read would wait for.
    #[cfg(unix)]
    #[test]
    fn a_pipe_is_refused_at_once() {
        let dir = TempDir::new("secret-pipe");
        let path = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }
}
