//! Which bytes are there of a file that is downloaded in segments.
//!
//! The content is a sparse file of the whole size. The map next to it counts the bytes at the beginning of each segment,
//! and is written after them, so that a download that is killed loses none.
//!
//! Layout of the map, all numbers u64 in little endian: [`MAGIC`], size of the file, size of a segment, and one count per
//! segment. All sizes are bytes.

use std::fs::{self, File};
use std::io::{Result, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

const MAGIC: u64 = u64::from_le_bytes(*b"segment1");
/// Numbers before the counts.
const HEADER: usize = 3;
const NUMBER: usize = size_of::<u64>();
/// Maximum number of segments: a file of 4 TiB in segments of 64 MiB.
const MAX_SEGMENTS: u64 = 1 << 16;

/// The bytes of a file that are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SegmentMap {
    /// Size of the file.
    pub(super) size: u64,
    segment: u64,
    /// Bytes at the beginning of each segment that are there.
    have: Vec<u64>,
}

impl SegmentMap {
    /// Map of a file of `size` bytes in segments of `segment` bytes. The first `present` bytes are already on disk.
    pub(super) fn new(size: u64, segment: u64, present: u64) -> Self {
        let segment = segment.max(size.div_ceil(MAX_SEGMENTS)).max(1);
        let mut map = Self { size, segment, have: vec![0; size.div_ceil(segment) as usize] };
        for i in 0..map.have.len() {
            let range = map.range(i);
            map.have[i] = present.clamp(range.start, range.end) - range.start;
        }
        map
    }

    /// Reads a map. `None` if there is none, or if it is damaged.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let bytes = fs::read(path).ok()?;
        let numbers: Vec<u64> =
            bytes.chunks_exact(NUMBER).filter_map(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes).collect();
        let (&[magic, size, segment], have) = numbers.split_first_chunk::<HEADER>()?;
        let map = Self { size, segment, have: have.to_vec() };
        let is_whole = magic == MAGIC && segment > 0 && map.have.len() as u64 == size.div_ceil(segment);
        let fits = |(i, &have): (usize, &u64)| have <= map.range(i).end - map.range(i).start;
        (is_whole && bytes.len().is_multiple_of(NUMBER) && map.have.iter().enumerate().all(fits)).then_some(map)
    }

    /// Writes the whole map.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let numbers = [MAGIC, self.size, self.segment].into_iter().chain(self.have.iter().copied());
        fs::write(path, numbers.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
    }

    /// Writes the count of one segment.
    pub(super) fn write_count(file: &mut File, i: usize, have: u64) -> Result<()> {
        file.seek(SeekFrom::Start(((HEADER + i) * NUMBER) as u64))?;
        file.write_all(&have.to_le_bytes())
    }

    /// Number of bytes that are there.
    pub(super) fn present(&self) -> u64 {
        self.have.iter().sum()
    }

    /// Number of segments.
    pub(super) fn segments(&self) -> usize {
        self.have.len()
    }

    /// The missing bytes of a segment, at its end.
    pub(super) fn missing(&self, i: usize) -> Range<u64> {
        let range = self.range(i);
        range.start + self.have[i]..range.end
    }

    /// The bytes of a segment.
    pub(super) fn range(&self, i: usize) -> Range<u64> {
        let start = i as u64 * self.segment;
        start..(start + self.segment).min(self.size)
    }

    /// End of the last byte that is there.
    pub(super) fn end(&self) -> u64 {
        let ends = (0..self.segments()).filter(|&i| self.have[i] > 0).map(|i| self.missing(i).start);
        ends.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_read_as_it_was_written_and_a_damaged_one_is_not() {
        let path = std::env::temp_dir().join(format!("pegainfer-segment-map-{}", std::process::id()));
        let map = SegmentMap::new(250, 100, 130);
        assert_eq!((map.segments(), map.present(), map.end()), (3, 130, 130));
        assert_eq!([map.missing(0), map.missing(1), map.missing(2)], [100..100, 130..200, 200..250]);
        map.write(&path).unwrap();
        let mut file = File::options().write(true).open(&path).unwrap();
        SegmentMap::write_count(&mut file, 2, 50).unwrap();
        let read = SegmentMap::read(&path).unwrap();
        assert_eq!((read.present(), read.end(), read.missing(2)), (180, 250, 250..250));

        let good = fs::read(&path).unwrap();
        let damaged = |change: fn(&mut Vec<u8>)| {
            let mut bytes = good.clone();
            change(&mut bytes);
            fs::write(&path, bytes).unwrap();
            SegmentMap::read(&path)
        };
        assert_eq!(damaged(|_| {}), Some(read));
        let changes: [fn(&mut Vec<u8>); 6] = [
            |bytes| bytes.clear(),
            |bytes| bytes.truncate(47),
            |bytes| bytes.extend([0; 8]),
            |bytes| bytes[0] ^= 1,
            |bytes| bytes[16] = 0,
            // More bytes than a segment has.
            |bytes| bytes[40] = 51,
        ];
        for (i, change) in changes.into_iter().enumerate() {
            assert_eq!(damaged(change), None, "{i}");
        }
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn sizes_at_the_limits_make_whole_maps() {
        assert_eq!(SegmentMap::new(0, 100, 0).segments(), 0);
        assert_eq!(SegmentMap::new(200, 100, 999).present(), 200);
        assert!(SegmentMap::new(u64::MAX / 2, 1, 0).segments() as u64 <= MAX_SEGMENTS);
    }
}
