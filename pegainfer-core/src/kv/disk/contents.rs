//! Reading what an existing file holds, and making a new one.

use super::error::DiskError;
use super::files::Files;
use super::format::{BadPage, Entry, FirstPage, Geometry, PAGE, SlotHeader};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;

/// Bytes of the header table that are read at once.
const READ_AT_ONCE: usize = 1 << 20;

/// A block that the file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Number of the slot.
    pub slot: u32,
    /// Number of the write: later writes have greater ones.
    pub sequence: u64,
    /// Header of the slot.
    pub header: SlotHeader,
}

/// Why nothing of an existing file can be used. The file was made new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reset {
    /// Its blocks belong to another model, or to another layout of KV.
    OtherModel,
    /// It has slots of another size, or another number of slots.
    OtherSize,
    /// It has this version of the format.
    OtherVersion(u32),
    /// Its first page is damaged.
    Damaged,
}

/// Blocks of a file.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// Blocks, oldest first. No two have the same name.
    pub found: Vec<Found>,
    /// Number of slots whose header is damaged.
    pub damaged: u32,
    /// Number of slots whose payload is beyond the end of the file.
    pub missing: u32,
    /// Number of slots whose block is in a newer slot too.
    pub duplicates: u32,
}

impl fmt::Display for Reset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherModel => f.write_str("it belonged to another model"),
            Self::OtherSize => f.write_str("it had another size"),
            Self::OtherVersion(version) => write!(f, "it had version {version} of the format"),
            Self::Damaged => f.write_str("its first page was damaged"),
        }
    }
}

/// Makes the open file one of `wanted` geometry and fingerprint, and reads the blocks of an earlier run. The epoch and
/// the secret of `wanted` are used for a new file. Returns the first page, and why earlier contents are void.
pub(super) fn prepare(
    files: &Files,
    path: &Path,
    wanted: FirstPage,
) -> Result<(FirstPage, Contents, Option<Reset>), DiskError> {
    let io_error = |operation| move |error| DiskError::Io { operation, path: path.to_owned(), error };
    let len = files.metadata().map_err(io_error("read"))?.len();
    let present = first_page(files, len).map_err(io_error("read"))?;
    let bytes = wanted.geometry.file_bytes();
    let reset = match present {
        None => None,
        Some(Err(BadPage::Foreign)) => return Err(DiskError::Foreign { path: path.to_owned() }),
        Some(Err(BadPage::Version(version))) => Some(Reset::OtherVersion(version)),
        Some(Err(BadPage::Damaged)) => Some(Reset::Damaged),
        Some(Ok(page)) if page.fingerprint != wanted.fingerprint => Some(Reset::OtherModel),
        Some(Ok(page)) if page.geometry != wanted.geometry => Some(Reset::OtherSize),
        Some(Ok(page)) => {
            let contents = Contents::read(files, &page, len).map_err(io_error("read"))?;
            files.preallocate(path, bytes)?;
            return Ok((page, contents, None));
        }
    };
    files.check_space(path, bytes)?;
    // The page comes first: a file is never left without its magic. Its epoch makes headers of earlier blocks void.
    files.write_all(0, &wanted.encode()).and_then(|()| files.sync()).map_err(io_error("write"))?;
    files.preallocate(path, bytes).inspect_err(|_| _ = files.truncate(PAGE as u64))?;
    Ok((wanted, Contents::default(), reset))
}

/// The first page of a file of `len` bytes; `None` if it is empty.
fn first_page(files: &Files, len: u64) -> io::Result<Option<Result<FirstPage, BadPage>>> {
    let mut page = [0; PAGE];
    let present = len.min(PAGE as u64) as usize;
    files.read_all(0, &mut page[..present])?;
    Ok((present > 0).then(|| FirstPage::decode(&page)))
}

impl Contents {
    /// Reads the header table of a file that had `len` bytes, and erases the headers that are void.
    fn read(files: &Files, page: &FirstPage, len: u64) -> io::Result<Self> {
        let geometry = &page.geometry;
        let mut contents = Self::default();
        let mut void = Vec::new();
        let at_once = READ_AT_ONCE / geometry.header_bytes;
        let mut table = vec![0; READ_AT_ONCE];
        for first in (0..geometry.slots).step_by(at_once) {
            let offset = geometry.header_offset(first);
            let headers = at_once.min((geometry.slots - first) as usize);
            let table = &mut table[..headers * geometry.header_bytes];
            // The rest of a truncated table is empty.
            table.fill(0);
            let present = usize::try_from(len.saturating_sub(offset)).unwrap_or(usize::MAX).min(table.len());
            files.read_all(offset, &mut table[..present])?;
            for (slot, bytes) in (first..).zip(table.chunks_exact(geometry.header_bytes)) {
                match SlotHeader::decode(bytes, page.epoch, slot) {
                    Entry::Empty => continue,
                    Entry::Block { sequence, header } if end_of_payload(geometry, slot) <= len => {
                        contents.found.push(Found { slot, sequence, header });
                        continue;
                    }
                    Entry::Block { .. } => contents.missing += 1,
                    Entry::Damaged => contents.damaged += 1,
                }
                void.push(slot);
            }
        }
        void.extend(contents.remove_duplicates());
        void.into_iter()
            .try_for_each(|slot| files.write_all(geometry.header_offset(slot), &[0; PAGE][..geometry.header_bytes]))?;
        Ok(contents)
    }

    /// Sorts the blocks by age and keeps the newest of those with the same name; returns the slots of the others.
    fn remove_duplicates(&mut self) -> Vec<u32> {
        self.found.sort_unstable_by_key(|found| found.sequence);
        let newest: HashMap<_, _> = self.found.iter().map(|found| (found.header.name, found.slot)).collect();
        let older: Vec<u32> = self
            .found
            .extract_if(.., |found| newest[&found.header.name] != found.slot)
            .map(|found| found.slot)
            .collect();
        self.duplicates = older.len() as u32;
        older
    }
}

fn end_of_payload(geometry: &Geometry, slot: u32) -> u64 {
    geometry.payload_offset(slot) + geometry.slot_bytes as u64
}
