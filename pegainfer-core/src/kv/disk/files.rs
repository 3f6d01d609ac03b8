//! The open file: handles, lock, preallocation, positional reads and writes.

use super::error::DiskError;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::time::{Duration, Instant};

/// Time between two attempts to lock the file.
const LOCK_POLL: Duration = Duration::from_millis(10);

/// The files, whether they were created, and why direct I/O is not possible.
type Opening = std::result::Result<(Files, bool, Option<String>), DiskError>;

/// Positional reads and writes of the KV file. A test puts a faulty medium in place of [`Files`].
pub(super) trait Media: Send + Sync + 'static {
    /// Reads some bytes at `offset`, if possible past the page cache if `direct`.
    fn read_at(&self, direct: bool, offset: u64, out: &mut [u8]) -> Result<usize>;

    /// Writes some bytes at `offset`.
    fn write_at(&self, direct: bool, offset: u64, bytes: &[u8]) -> Result<usize>;
}

/// Handles of the KV file.
#[derive(Debug)]
pub(super) struct Files {
    cached: File,
    /// The same file, past the page cache; holds the lock, because transfers that outlive a killed process use it.
    direct: Option<File>,
}

impl Files {
    /// Opens or creates the file at `path` and locks it; changes nothing of an existing file. Waits for another process
    /// that has the file, at most for `lock_wait`. Also returns whether the file was created, and why direct I/O is not
    /// possible.
    pub fn open(path: &Path, want_direct: bool, lock_wait: Duration) -> Opening {
        let io_error = |operation| move |error| DiskError::Io { operation, path: path.to_owned(), error };
        let is_new = match std::fs::metadata(path) {
            Ok(metadata) if !metadata.is_file() => return Err(DiskError::NotRegular { path: path.to_owned() }),
            Ok(_) => false,
            Err(error) if error.kind() == ErrorKind::NotFound => true,
            Err(error) => return Err(io_error("open")(error)),
        };
        let cached = options().create(true).open(path).map_err(io_error("open"))?;
        let (direct, why_not) = match want_direct.then(|| direct::open(path, &cached)) {
            Some(Ok(direct)) => (Some(direct), None),
            Some(Err(error)) => (None, Some(error.to_string())),
            None => (None, Some("it is switched off".to_owned())),
        };
        let (files, deadline) = (Self { cached, direct }, Instant::now() + lock_wait);
        loop {
            match files.handle(true).try_lock() {
                Ok(()) => return Ok((files, is_new, why_not)),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_POLL),
                Err(TryLockError::WouldBlock) => return Err(DiskError::Locked { path: path.to_owned() }),
                Err(TryLockError::Error(error)) => return Err(io_error("lock")(error)),
            }
        }
    }

    /// Size and allocated bytes.
    pub fn metadata(&self) -> Result<Metadata> {
        self.cached.metadata()
    }

    /// The handle of a transfer.
    pub fn handle(&self, direct: bool) -> &File {
        self.direct.as_ref().filter(|_| direct).unwrap_or(&self.cached)
    }

    /// Reads all of `out` through the page cache.
    pub fn read_all(&self, mut offset: u64, mut out: &mut [u8]) -> Result<()> {
        while !out.is_empty() {
            match self.read_at(false, offset, out) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => (offset, out) = (offset + bytes as u64, &mut out[bytes..]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` through the page cache.
    pub fn write_all(&self, mut offset: u64, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            match self.write_at(false, offset, bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => (offset, bytes) = (offset + written as u64, &bytes[written..]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes what was written survive a power failure.
    pub fn sync(&self) -> Result<()> {
        self.cached.sync_data()
    }

    /// Fails if the file system cannot give the file `bytes` bytes. Changes nothing.
    pub fn check_space(&self, path: &Path, bytes: u64) -> std::result::Result<(), DiskError> {
        match space::available(&self.cached) {
            Ok(Some(free)) if free < bytes => Err(DiskError::NoSpace { path: path.to_owned(), needed: bytes, free }),
            Ok(_) => Ok(()),
            Err(error) => Err(DiskError::Io { operation: "preallocate", path: path.to_owned(), error }),
        }
    }

    /// Gives the file `bytes` bytes on disk, so that later writes cannot find the disk full. New bytes read as zeros.
    /// On file systems that cannot reserve, the file is sparse.
    pub fn preallocate(&self, path: &Path, bytes: u64) -> std::result::Result<(), DiskError> {
        let io_error = |error| DiskError::Io { operation: "preallocate", path: path.to_owned(), error };
        if self.metadata().map_err(io_error)?.len() > bytes {
            self.cached.set_len(bytes).map_err(io_error)?;
        }
        self.check_space(path, bytes)?;
        space::reserve(&self.cached, bytes).map_err(io_error)
    }

    /// Gives bytes after the first `bytes` back to the file system.
    pub fn truncate(&self, bytes: u64) -> Result<()> {
        self.cached.set_len(bytes)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Closing unlocks as well, but io_uring keeps a file open for a moment after its last transfer.
        _ = self.handle(true).unlock();
    }
}

#[cfg(unix)]
impl Media for Files {
    fn read_at(&self, direct: bool, offset: u64, out: &mut [u8]) -> Result<usize> {
        std::os::unix::fs::FileExt::read_at(self.handle(direct), out, offset)
    }

    fn write_at(&self, direct: bool, offset: u64, bytes: &[u8]) -> Result<usize> {
        std::os::unix::fs::FileExt::write_at(self.handle(direct), bytes, offset)
    }
}

#[cfg(windows)]
impl Media for Files {
    fn read_at(&self, direct: bool, offset: u64, out: &mut [u8]) -> Result<usize> {
        std::os::windows::fs::FileExt::seek_read(self.handle(direct), out, offset)
    }

    fn write_at(&self, direct: bool, offset: u64, bytes: &[u8]) -> Result<usize> {
        std::os::windows::fs::FileExt::seek_write(self.handle(direct), bytes, offset)
    }
}

/// For reading and writing. A new file is readable by its owner only, because it says what users sent.
fn options() -> OpenOptions {
    let mut options = File::options();
    options.read(true).write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

#[cfg(target_os = "linux")]
mod direct {
    use super::super::format::PAGE;
    use super::super::memory::AlignedMemory;
    use super::{Error, File, Path, Result, options};
    use rustix::fs::OFlags;
    use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

    /// A second handle of `file` that bypasses the page cache, if the file system can do so in units of a page.
    pub(super) fn open(path: &Path, file: &File) -> Result<File> {
        let direct = options().custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path)?;
        let [first, second] = [file.metadata()?, direct.metadata()?];
        if (first.dev(), first.ino()) != (second.dev(), second.ino()) {
            return Err(Error::other("the file was replaced"));
        }
        direct.read_at(AlignedMemory::zeroed(PAGE).as_mut_slice(), 0)?;
        Ok(direct)
    }
}

#[cfg(not(target_os = "linux"))]
mod direct {
    use super::{Error, ErrorKind, File, Path, Result};

    pub(super) fn open(_: &Path, _: &File) -> Result<File> {
        Err(Error::new(ErrorKind::Unsupported, "it is used on Linux only"))
    }
}

#[cfg(target_os = "linux")]
mod space {
    use super::{File, Result};
    use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
    use rustix::io::Errno;
    use std::os::unix::fs::MetadataExt;

    /// Bytes that `file` could have: the free ones of its file system and its own.
    pub(super) fn available(file: &File) -> Result<Option<u64>> {
        let system = fstatvfs(file)?;
        let own = file.metadata()?.blocks() * 512;
        Ok(Some(system.f_bavail.saturating_mul(system.f_frsize).saturating_add(own)))
    }

    /// Allocates the first `bytes` bytes of `file`.
    pub(super) fn reserve(file: &File, bytes: u64) -> Result<()> {
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
            result => Ok(result?),
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod space {
    use super::{File, Result};

    pub(super) fn available(_: &File) -> Result<Option<u64>> {
        Ok(None)
    }

    pub(super) fn reserve(file: &File, bytes: u64) -> Result<()> {
        file.set_len(bytes)
    }
}
