//! Download of a large file in segments, over several connections.

use super::blob::{BUFFER, Blob};
use super::client::{RequestError, TRIES};
use super::connections::CONNECTIONS;
use super::segment_map::SegmentMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// The paths of a file that is downloaded in segments.
struct Paths {
    data: PathBuf,
    map: PathBuf,
}

/// State that the connections of a file share.
struct Shared<'a> {
    paths: &'a Paths,
    map: &'a SegmentMap,
    next: AtomicUsize,
    /// Bytes of the file that are there.
    present: AtomicU64,
    /// The first error. The other connections end after it, and keep what they have.
    failed: Mutex<Option<RequestError>>,
}

impl Blob<'_> {
    /// Downloads the missing bytes of all segments, verifies the file and returns its path. A file with a wrong hash is
    /// deleted.
    pub(super) fn in_segments(&self) -> Result<PathBuf, RequestError> {
        let hash = &self.info.hash;
        let paths = Paths { data: self.repo.segments(hash), map: self.repo.segment_map(hash) };
        let map = self.open(&paths)?;
        let resumed = map.present() > 0;
        let received = self.receive_segments(&paths, &map);
        if let Err(RequestError::NoRanges) = received {
            remove(&paths)?;
        }
        received?;
        let mut file = File::open(&paths.data)?;
        let mut context = hash.start(self.info.size);
        self.hash_present(&mut file, &mut context)?;
        if let Err(reason) = self.check_hash(context) {
            remove(&paths)?;
            let again = if resumed { RequestError::Network } else { RequestError::Rejected };
            return Err(again(reason));
        }
        file.sync_all()?;
        fs::remove_file(&paths.map)?;
        Ok(paths.data)
    }

    /// The map of an interrupted download, or else of a file that was begun in one segment, or of a new one.
    fn open(&self, paths: &Paths) -> std::io::Result<SegmentMap> {
        let size = self.info.size;
        let length = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
        let earlier = SegmentMap::read(&paths.map)
            .filter(|map| map.size == size && map.end() <= length(&paths.data) && length(&paths.data) <= size);
        let map = match earlier {
            Some(map) => map,
            None => {
                let partial = self.repo.partial(&self.info.hash);
                let begun = Some(length(&partial)).filter(|bytes| (1..=size).contains(bytes));
                // A killed program leaves a map without content, which is not taken.
                remove(paths)?;
                let map = SegmentMap::new(size, self.client.segment, begun.unwrap_or(0));
                map.write(&paths.map)?;
                if begun.is_some() {
                    fs::rename(&partial, &paths.data)?;
                }
                map
            }
        };
        File::options().write(true).create(true).truncate(false).open(&paths.data)?.set_len(size)?;
        Ok(map)
    }

    fn receive_segments(&self, paths: &Paths, map: &SegmentMap) -> Result<(), RequestError> {
        let (next, present, failed) = (AtomicUsize::new(0), AtomicU64::new(map.present()), Mutex::new(None));
        let shared = Shared { paths, map, next, present, failed };
        let left = (0..map.segments()).filter(|&i| !map.missing(i).is_empty()).count();
        thread::scope(|scope| {
            let threads: Vec<_> = (0..left.min(CONNECTIONS)).map(|_| scope.spawn(|| self.work(&shared))).collect();
            for thread in threads {
                thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
        });
        shared.failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Downloads segments until none is left.
    fn work(&self, shared: &Shared<'_>) {
        loop {
            let i = shared.next.fetch_add(1, Ordering::Relaxed);
            if i >= shared.map.segments() || shared.has_failed() {
                return;
            }
            let mut missing = shared.map.missing(i);
            let _connection = (!missing.is_empty()).then(|| self.connections.take());
            let result = self.client.retry((self.name, TRIES), || {
                if missing.is_empty() || shared.has_failed() { Ok(()) } else { self.segment(shared, i, &mut missing) }
            });
            if let Err(error) = result {
                shared.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    }

    /// Downloads the missing end of a segment, and moves the start of `missing` as far as it gets.
    fn segment(&self, shared: &Shared<'_>, i: usize, missing: &mut std::ops::Range<u64>) -> Result<(), RequestError> {
        let response = match self.client.get_part(&self.url, missing) {
            Err(RequestError::Status(416)) => return Err(RequestError::NoRanges),
            response => response?,
        };
        if !self.is_part(&response, missing)? {
            return Err(RequestError::NoRanges);
        }
        let mut data = File::options().write(true).open(&shared.paths.data)?;
        let mut map = File::options().write(true).open(&shared.paths.map)?;
        data.seek(SeekFrom::Start(missing.start))?;
        let (mut body, mut buffer) = (self.client.body(response), vec![0; BUFFER]);
        while !missing.is_empty() && !shared.has_failed() {
            let wanted = buffer.len().min((missing.end - missing.start) as usize);
            let count = body.read(&mut buffer[..wanted]).map_err(|error| RequestError::Network(error.to_string()))?;
            if count == 0 {
                let reason = format!("the connection ended {} bytes too early", missing.end - missing.start);
                return Err(RequestError::Network(reason));
            }
            data.write_all(&buffer[..count])?;
            missing.start += count as u64;
            SegmentMap::write_count(&mut map, i, missing.start - shared.map.range(i).start)?;
            (self.report)(shared.present.fetch_add(count as u64, Ordering::Relaxed) + count as u64)?;
        }
        Ok(())
    }
}

impl Shared<'_> {
    fn has_failed(&self) -> bool {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// Deletes content and map, if they are there.
fn remove(paths: &Paths) -> std::io::Result<()> {
    for path in [&paths.data, &paths.map] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
