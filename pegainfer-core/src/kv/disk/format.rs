//! Format of the file: where slots lie, and the bytes of headers. Numbers are little-endian, names are big-endian.
//!
//! | part | bytes | contents |
//! |---|---|---|
//! | first page | 4,096 | magic, version, sizes, epoch, fingerprint, secret |
//! | header table | slots × header bytes, padded to 4,096 | one [`SlotHeader`] per slot; 256 bytes for 16 tokens |
//! | payloads | slots × slot bytes, each padded to 4,096 | the blocks |
//!
//! Headers lie together, not next to their payloads, so that the index of 100,000 slots is one sequential read of 25 MB
//! at start, and not 100,000 reads all over the disk.

use super::error::DiskError;
use crate::kv::ContentName;

/// Unit of direct I/O: offsets, lengths and addresses are multiples of it.
pub(super) const PAGE: usize = 4096;
/// The first bytes of every KV file.
const MAGIC: [u8; 16] = *b"PegaInfer KV\r\n\x1a\n";
/// Version of the format.
const VERSION: u32 = 1;
/// Bytes of a header before its tokens.
const FIXED: usize = 68;
/// Maximum number of tokens of a slot; a header fits into a page.
pub(super) const MAX_TOKENS: usize = (PAGE - FIXED) / 4;

/// Header of a slot: which block it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotHeader {
    /// Content name of the block.
    pub name: ContentName,
    /// Content name of the block before it in its sequence; `None` for the first one.
    pub parent: Option<ContentName>,
    /// Tokens of the block.
    pub tokens: Vec<u32>,
    /// Checksum of the payload. The store only keeps it; whoever loads the slot compares it.
    pub checksum: u64,
}

/// Where the parts of the file lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes of a payload.
    pub slot_bytes: usize,
    /// Bytes of a header.
    pub header_bytes: usize,
    /// Number of slots.
    pub slots: u32,
}

/// What one entry of the header table says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// No block.
    Empty,
    /// A header that was changed, or written in part.
    Damaged,
    /// A block and its number in the order of writes.
    Block { sequence: u64, header: SlotHeader },
}

/// The first page of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FirstPage {
    pub geometry: Geometry,
    /// Random number in every header; a new one makes all earlier headers void.
    pub epoch: u64,
    pub fingerprint: [u8; 32],
    pub secret: [u8; 32],
}

/// Why a first page cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadPage {
    /// PegaInfer did not write it.
    Foreign,
    /// Another version of the format.
    Version(u32),
    /// The checksum does not match.
    Damaged,
}

impl Geometry {
    /// As many slots as fit into `bytes`.
    pub fn fit(bytes: u64, slot_bytes: usize, slot_tokens: usize) -> Result<Self, DiskError> {
        if slot_bytes == 0 || slot_tokens > MAX_TOKENS {
            return Err(DiskError::BadSlot { slot_bytes, slot_tokens, max_tokens: MAX_TOKENS });
        }
        let header_bytes = (FIXED + 4 * slot_tokens).next_power_of_two();
        let one = Self { slot_bytes, header_bytes, slots: 1 };
        let slots = bytes.saturating_sub(PAGE as u64) / (one.stride() + header_bytes as u64);
        let mut fitted = Self { slots: u32::try_from(slots).unwrap_or(u32::MAX), ..one };
        // The padding of the table may take the last slot.
        while fitted.slots > 0 && fitted.file_bytes() > bytes {
            fitted.slots -= 1;
        }
        if fitted.slots == 0 {
            return Err(DiskError::TooSmall { bytes, needed: one.file_bytes() });
        }
        Ok(fitted)
    }

    /// Bytes from the start of a payload to that of the next one.
    fn stride(&self) -> u64 {
        self.slot_bytes.next_multiple_of(PAGE) as u64
    }

    /// Bytes of the header table without padding.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.slots) * self.header_bytes as u64
    }

    /// Where the header of `slot` begins.
    pub fn header_offset(&self, slot: u32) -> u64 {
        PAGE as u64 + u64::from(slot) * self.header_bytes as u64
    }

    /// Where the payload of `slot` begins.
    pub fn payload_offset(&self, slot: u32) -> u64 {
        let first = (PAGE as u64 + self.table_bytes()).next_multiple_of(PAGE as u64);
        first + u64::from(slot) * self.stride()
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.payload_offset(self.slots)
    }
}

impl FirstPage {
    /// The bytes of the first page.
    pub fn encode(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        let Geometry { slot_bytes, header_bytes, slots } = self.geometry;
        let fields: [&[u8]; 6] = [
            &(slot_bytes as u64).to_le_bytes(),
            &(header_bytes as u32).to_le_bytes(),
            &slots.to_le_bytes(),
            &self.epoch.to_le_bytes(),
            &self.fingerprint,
            &self.secret,
        ];
        page[24..24 + 88].copy_from_slice(&fields.concat());
        page[..16].copy_from_slice(&MAGIC);
        page[16..20].copy_from_slice(&VERSION.to_le_bytes());
        let crc = crc32fast::hash(&page[24..]);
        page[20..24].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// The page that these bytes are.
    pub fn decode(page: &[u8; PAGE]) -> Result<Self, BadPage> {
        let mut fields = Fields(page);
        if fields.take() != MAGIC {
            return Err(BadPage::Foreign);
        }
        let version = u32::from_le_bytes(fields.take());
        if version != VERSION {
            return Err(BadPage::Version(version));
        }
        if u32::from_le_bytes(fields.take()) != crc32fast::hash(&page[24..]) {
            return Err(BadPage::Damaged);
        }
        let slot_bytes = usize::try_from(u64::from_le_bytes(fields.take())).map_err(|_| BadPage::Damaged)?;
        let header_bytes = u32::from_le_bytes(fields.take()) as usize;
        let slots = u32::from_le_bytes(fields.take());
        let geometry = Geometry { slot_bytes, header_bytes, slots };
        let epoch = u64::from_le_bytes(fields.take());
        Ok(Self { geometry, epoch, fingerprint: fields.take(), secret: fields.take() })
    }
}

impl SlotHeader {
    /// The bytes of the header, to be written for `slot`.
    pub(super) fn encode(&self, epoch: u64, slot: u32, sequence: u64) -> Vec<u8> {
        let parent = self.parent.map_or([0; 16], ContentName::to_bytes);
        let mut bytes = vec![0; 4];
        bytes.extend((self.tokens.len() as u32).to_le_bytes());
        bytes.extend([epoch, sequence, self.checksum].map(u64::to_le_bytes).as_flattened());
        bytes.extend([self.name.to_bytes(), parent].as_flattened());
        bytes.extend(slot.to_le_bytes());
        bytes.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        let crc = crc32fast::hash(&bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// What the entry of `slot` in the header table says.
    pub(super) fn decode(bytes: &[u8], epoch: u64, slot: u32) -> Entry {
        let mut fields = Fields(bytes);
        let crc = u32::from_le_bytes(fields.take());
        let tokens = u32::from_le_bytes(fields.take()) as usize;
        if u64::from_le_bytes(fields.take()) != epoch {
            return Entry::Empty;
        }
        let Some(end) = tokens.checked_mul(4).and_then(|bytes| bytes.checked_add(FIXED)) else { return Entry::Damaged };
        if bytes.get(4..end).is_none_or(|bytes| crc32fast::hash(bytes) != crc) {
            return Entry::Damaged;
        }
        let (sequence, checksum) = (u64::from_le_bytes(fields.take()), u64::from_le_bytes(fields.take()));
        let [name, parent] = [fields.take(), fields.take()].map(ContentName::from_bytes);
        let Some(name) = name.filter(|_| u32::from_le_bytes(fields.take()) == slot) else { return Entry::Damaged };
        let (tokens, _) = bytes[FIXED..end].as_chunks();
        let tokens = tokens.iter().map(|token| u32::from_le_bytes(*token)).collect();
        Entry::Block { sequence, header: SlotHeader { name, parent, tokens, checksum } }
    }
}

/// Fields of fixed size, one after the other. A header and a page are longer than all their fixed fields.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("fields within the fixed part");
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::{Rng, seed};

    fn name(number: u128) -> ContentName {
        ContentName::from_bytes(number.to_be_bytes()).unwrap()
    }

    fn header(tokens: usize) -> SlotHeader {
        SlotHeader {
            name: name(u128::MAX - 5),
            parent: Some(name(7)),
            tokens: (0..tokens as u32).map(|i| i * 77_777).collect(),
            checksum: 0x1234_5678_9ABC_DEF0,
        }
    }

    #[test]
    fn slots_fill_the_file_and_do_not_overlap() {
        for (bytes, slot_bytes, tokens) in [(12_288, 4096, 16), (100_000, 5000, 1), (1 << 30, 2_359_296, 16)] {
            let geometry = Geometry::fit(bytes, slot_bytes, tokens).unwrap();
            let one_more = Geometry { slots: geometry.slots + 1, ..geometry };
            assert!(geometry.file_bytes() <= bytes && one_more.file_bytes() > bytes, "{geometry:?}");
            assert!(geometry.header_offset(geometry.slots) <= geometry.payload_offset(0));
            assert!(geometry.payload_offset(1) - geometry.payload_offset(0) >= slot_bytes as u64);
            assert!(geometry.payload_offset(0).is_multiple_of(PAGE as u64));
            assert!(FIXED + 4 * tokens <= geometry.header_bytes && PAGE.is_multiple_of(geometry.header_bytes));
        }
    }

    #[test]
    fn sizes_that_hold_nothing_are_refused() {
        assert!(matches!(Geometry::fit(12_287, 4096, 16), Err(DiskError::TooSmall { needed: 12_288, .. })));
        assert!(matches!(Geometry::fit(0, 4096, 16), Err(DiskError::TooSmall { .. })));
        assert!(matches!(Geometry::fit(1 << 30, 0, 16), Err(DiskError::BadSlot { .. })));
        assert!(matches!(Geometry::fit(1 << 30, 4096, MAX_TOKENS + 1), Err(DiskError::BadSlot { .. })));
        assert_eq!(Geometry::fit(1 << 30, 4096, MAX_TOKENS).unwrap().header_bytes, PAGE);
    }

    #[test]
    fn a_page_comes_back_and_any_changed_bit_is_noticed() {
        let geometry = Geometry::fit(1 << 30, 2_359_296, 16).unwrap();
        let page = FirstPage { geometry, epoch: 99, fingerprint: [3; 32], secret: [4; 32] };
        let bytes = page.encode();
        assert_eq!(FirstPage::decode(&bytes), Ok(page));
        for bit in 0..8 * PAGE {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            let expected = match bit / 8 {
                0..16 => BadPage::Foreign,
                16..20 => BadPage::Version(VERSION ^ 1 << (bit - 128)),
                _ => BadPage::Damaged,
            };
            assert_eq!(FirstPage::decode(&changed), Err(expected), "bit {bit}");
        }
    }

    #[test]
    fn a_header_comes_back_and_any_changed_bit_hides_it() {
        for header in [header(16), header(0), SlotHeader { parent: None, ..header(1) }] {
            let mut bytes = header.encode(5, 6, 7);
            let used = bytes.len();
            bytes.resize(256, 0);
            assert_eq!(SlotHeader::decode(&bytes, 5, 6), Entry::Block { sequence: 7, header });
            for bit in 0..8 * used {
                let mut changed = bytes.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                let entry = SlotHeader::decode(&changed, 5, 6);
                assert_eq!(entry, if (8..16).contains(&(bit / 8)) { Entry::Empty } else { Entry::Damaged }, "{bit}");
            }
            assert_eq!(SlotHeader::decode(&bytes, 4, 6), Entry::Empty, "of an earlier epoch");
            assert_eq!(SlotHeader::decode(&bytes, 5, 7), Entry::Damaged, "copied to another place");
        }
        assert_eq!(SlotHeader::decode(&[0; 256], 5, 6), Entry::Empty);
    }

    #[test]
    fn random_bytes_are_no_header() {
        let mut rng = Rng(seed());
        for _ in 0..10_000 {
            let mut bytes: Vec<u8> = (0..256).map(|_| rng.below(256) as u8).collect();
            bytes[8..16].copy_from_slice(&5u64.to_le_bytes());
            assert_eq!(SlotHeader::decode(&bytes, 5, 6), Entry::Damaged);
        }
    }
}
