//! Download of one file: resumable, limited to the listed size, and renamed to its place only after verification.

use super::cache::RepoCache;
use super::client::{Client, RequestError, TRIES};
use super::connections::Connections;
use super::listing::FileInfo;
use ring::digest;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use ureq::Body;
use ureq::http::{Response, header};

pub(super) const BUFFER: usize = 1 << 16;

/// Called with the number of bytes of a file that are there. Its error ends the download of the file.
pub(super) type Report<'a> = &'a (dyn Fn(u64) -> Result<(), RequestError> + Sync);

/// One file of a listing.
pub(super) struct Blob<'a> {
    pub(super) client: &'a Client,
    pub(super) repo: &'a RepoCache,
    pub(super) url: String,
    /// Name for messages.
    pub(super) name: &'a str,
    pub(super) info: &'a FileInfo,
    pub(super) connections: &'a Connections,
    pub(super) report: Report<'a>,
}

impl Blob<'_> {
    /// Puts the file into the cache, unless it is there.
    pub(super) fn fetch(&self) -> Result<(), RequestError> {
        if self.repo.has(self.info) {
            return Ok(());
        }
        let _lock = self.repo.lock(&self.info.hash, self.name)?;
        if self.repo.has(self.info) {
            return Ok(());
        }
        let whole = match self.is_large().then(|| self.client.retry((self.name, 2), || self.in_segments())) {
            None | Some(Err(RequestError::NoRanges)) => self.in_one()?,
            Some(result) => result?,
        };
        Ok(fs::rename(whole, self.repo.blob(&self.info.hash))?)
    }

    /// True for a file of several segments, or one that was begun in segments.
    fn is_large(&self) -> bool {
        self.info.size > self.client.segment || self.repo.segment_map(&self.info.hash).exists()
    }

    fn in_one(&self) -> Result<PathBuf, RequestError> {
        let partial = self.repo.partial(&self.info.hash);
        let _connection = self.connections.take();
        self.client.retry((self.name, TRIES), || self.attempt(&partial))?;
        Ok(partial)
    }

    /// Completes the partial file and verifies it. A file that cannot be completed is emptied.
    fn attempt(&self, partial: &Path) -> Result<(), RequestError> {
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(partial)?;
        let mut hash = self.info.hash.start(self.info.size);
        let mut have = self.hash_present(&mut file, &mut hash)?;
        let resumed = have > 0;
        if have < self.info.size {
            let response = match self.client.get(&self.url, have) {
                // The local part is not the beginning of the hub's file.
                Err(RequestError::Status(416)) => return Err(discard(&file, true, "the hub cannot resume it")),
                response => response?,
            };
            if have > 0 && !self.is_part(&response, &(have..self.info.size))? {
                // The hub sends the whole file instead of the rest of it.
                (have, hash) = (0, self.info.hash.start(self.info.size));
                file.set_len(0)?;
                file.seek(SeekFrom::Start(0))?;
            }
            self.receive(response, (&mut file, &mut hash), have)?;
        }
        self.check_hash(hash).map_err(|reason| discard(&file, resumed, &reason))?;
        Ok(file.sync_all()?)
    }

    /// Compares a hash of the whole content with the listed one.
    pub(super) fn check_hash(&self, hash: digest::Context) -> Result<(), String> {
        let (digits, listed) = (hex(hash.finish().as_ref()), self.info.hash.digits());
        if digits == listed { Ok(()) } else { Err(format!("its hash is {digits}, but the hub lists {listed}")) }
    }

    /// Hashes the bytes left by an earlier try and returns their number. A file longer than the listed size is emptied.
    pub(super) fn hash_present(&self, file: &mut File, hash: &mut digest::Context) -> std::io::Result<u64> {
        let length = file.metadata()?.len();
        if length > self.info.size {
            file.set_len(0)?;
            return Ok(0);
        }
        let mut buffer = vec![0; BUFFER];
        let mut left = length;
        while left > 0 {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            hash.update(&buffer[..count]);
            left -= count as u64;
        }
        Ok(length - left)
    }

    /// True for a response with the bytes that were asked for, false for one with the whole file. ModelScope sends parts
    /// with status 200.
    pub(super) fn is_part(&self, response: &Response<Body>, bytes: &Range<u64>) -> Result<bool, RequestError> {
        let expected = format!("bytes {}-{}/{}", bytes.start, bytes.end - 1, self.info.size);
        match response.headers().get(header::CONTENT_RANGE) {
            Some(range) if *range == expected => Ok(true),
            None if response.status() != 206 => Ok(false),
            range => {
                let reason = format!("the hub sends the range {range:?} where {expected:?} was asked for");
                Err(RequestError::Rejected(reason))
            }
        }
    }

    /// Appends the body, which must have exactly the missing bytes.
    fn receive(
        &self,
        response: Response<Body>,
        (file, hash): (&mut File, &mut digest::Context),
        have: u64,
    ) -> Result<(), RequestError> {
        let size = self.info.size;
        if response.body().content_length().is_some_and(|length| length != size - have) {
            return Err(discard(file, false, &format!("the hub does not send the {size} bytes that it lists")));
        }
        // Reading one byte more than is missing detects a body that is too long.
        let mut body = self.client.body(response).take(size - have + 1);
        let (mut buffer, mut have) = (vec![0; BUFFER], have);
        loop {
            let count = body.read(&mut buffer).map_err(|error| RequestError::Network(error.to_string()))?;
            if count == 0 {
                break;
            }
            have += count as u64;
            if have > size {
                return Err(discard(file, false, &format!("the hub sends more than the {size} bytes it lists")));
            }
            file.write_all(&buffer[..count])?;
            hash.update(&buffer[..count]);
            (self.report)(have)?;
        }
        if have < size {
            return Err(RequestError::Network(format!("the connection ended after {have} of {size} bytes")));
        }
        Ok(())
    }
}

/// Empties a partial file that cannot be completed. Another try may succeed if the file was `resumed`, because the
/// earlier bytes may be wrong.
fn discard(file: &File, resumed: bool, reason: &str) -> RequestError {
    match file.set_len(0) {
        Ok(()) if resumed => RequestError::Network(reason.to_string()),
        Ok(()) => RequestError::Rejected(reason.to_string()),
        Err(error) => RequestError::Disk(error),
    }
}

/// Lower-case hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
