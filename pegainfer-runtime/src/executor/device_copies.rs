//! Copies of KV blocks and states between a GPU and host memory, beside its steps.
//!
//! Some blocks at once are packed into staging memory of the device and copied to their slots, or the other way, with
//! the checksums of their bytes as the device sees them. There are two streams for each direction: while one copies,
//! the other packs. A kernel that runs all layers of a step leaves no multiprocessor to others, so that packing waits
//! for its end: staging memory holds what is copied meanwhile.

use pegainfer_core::cuda::{CopyMark, HostWords, PinnedSlots, SlotBytes};
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::disk::SlotKind;
use pegainfer_core::kv::tiers::{BlockCopy, Checksum, Direction, TransferId};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{MAX_PACKED_ROWS, PackSegment, PackedRows, pack_rows, pack_segments, unpack_rows};
use std::time::Duration;

/// Streams for each direction.
const STREAMS: usize = 2;
/// Bytes of the staging memory of a stream that stores, and of one that loads, for which requests wait.
const STAGING_BYTES: [usize; 2] = [16 << 20, 64 << 20];
/// Most segments in flight.
const SEGMENTS: usize = 32 << 10;
/// Words of the sums of a segment.
const SUM_WORDS: usize = 4;

/// Slots of host memory for blocks and for states, and the copies in flight.
#[derive(Debug)]
pub(super) struct DeviceCopies {
    /// Blocks, then states if the model has some; by [`SlotKind`].
    kinds: Vec<Kind>,
    /// One for each stream: those that store, then those that load.
    staging: Vec<Staging>,
    /// The stream of its direction that is next.
    next: usize,
    /// Rows and, behind them all, sums of the segments in flight, segment `n` at `n % SEGMENTS`.
    words: HostWords,
    /// Number of segments so far, and of those that are done.
    begun: usize,
    done: usize,
    /// Oldest first.
    transfers: Vec<InFlight>,
}

/// Slots for rows of some tensors.
#[derive(Debug)]
struct Kind {
    slots: PinnedSlots,
    segments: Vec<PackSegment>,
}

#[derive(Debug)]
struct Staging {
    /// `[bytes]` u8.
    packed: Tensor,
    /// `[MAX_PACKED_ROWS]` u32.
    rows: Tensor,
}

/// A transfer that has begun.
#[derive(Debug)]
struct InFlight {
    id: TransferId,
    /// Segments of its blocks and states, in order.
    copies: Vec<Vec<usize>>,
    /// Before its first copy.
    begins: CopyMark,
    /// After the last one, once all of it has begun.
    ends: Option<CopyMark>,
}

impl DeviceCopies {
    /// Host memory for so many rows of the tensors of blocks, and of those of states, of which there may be none.
    pub fn new(exec: &mut Exec, kinds: [(&[&mut Tensor], usize); 2]) -> Result<Self, OpError> {
        exec.open_copy_streams(2 * STREAMS)?;
        let mut opened = Vec::new();
        for (tensors, slots) in kinds.into_iter().filter(|(_, slots)| *slots > 0) {
            let segments = pack_segments(exec, tensors, STAGING_BYTES[0])?;
            let bytes = segments.iter().map(|segment| segment.bytes).sum();
            opened.push(Kind { slots: PinnedSlots::new(exec.gpu()?, slots, bytes)?, segments });
        }
        let mut staging = Vec::new();
        for bytes in STAGING_BYTES.into_iter().flat_map(|bytes| [bytes; STREAMS]) {
            let mut tensor = |name, elements, dtype| {
                let tensor = exec.tensor(name, &[elements], dtype);
                tensor.map_err(|e| OpError { op: "host tier", message: e.to_string() })
            };
            let packed = tensor("packed", bytes, DType::U8)?;
            staging.push(Staging { packed, rows: tensor("packed rows", MAX_PACKED_ROWS, DType::U32)? });
        }
        let words = HostWords::new(exec.gpu()?, (1 + SUM_WORDS) * SEGMENTS)?;
        Ok(Self { kinds: opened, staging, next: 0, words, begun: 0, done: 0, transfers: Vec::new() })
    }

    /// The bytes of a slot.
    pub fn slot(&mut self, kind: SlotKind, slot: u32) -> &mut [u8] {
        self.kinds[kind as usize].slots.slot(slot)
    }

    /// True if the device may use the slots of these blocks and states.
    pub fn can_begin(&self, copies: [&[BlockCopy]; 2]) -> bool {
        let mut kinds = self.kinds.iter().zip(copies);
        kinds.all(|(kind, copies)| copies.iter().all(|copy| kind.slots.is_usable(copy.slot)))
    }

    /// Begins to copy these blocks and states of a transfer; `ends`: they are the last ones. The first ones start after
    /// all steps that were launched.
    pub fn begin(
        &mut self,
        exec: &mut Exec,
        (id, direction): (TransferId, Direction),
        copies: [&[BlockCopy]; 2],
        ends: bool,
    ) -> Result<(), OpError> {
        if self.transfers.iter().all(|transfer| transfer.id != id) {
            exec.start_copies()?;
            let begins = exec.gpu()?.mark_copies(first_stream(direction), STREAMS)?;
            self.transfers.push(InFlight { id, copies: Vec::new(), begins, ends: None });
        }
        let mut listed = Vec::new();
        for (kind, copies) in (0..self.kinds.len()).zip(copies) {
            let first = listed.len();
            listed.resize(first + copies.len(), Vec::new());
            for segment in 0..self.kinds[kind].segments.len() {
                let mut left = copies;
                while !left.is_empty() {
                    let (begun, count) = (self.begun, self.copy_some(exec, (kind, segment), left, direction)?);
                    let done = first + copies.len() - left.len();
                    listed[done..done + count]
                        .iter_mut()
                        .zip(begun..)
                        .for_each(|(segments, segment)| segments.push(segment));
                    left = &left[count..];
                }
            }
        }
        let first = first_stream(direction);
        let mark = if ends { Some(exec.gpu()?.mark_copies(first, STREAMS)?) } else { None };
        if let Some(transfer) = self.transfers.iter_mut().find(|transfer| transfer.id == id) {
            transfer.copies.extend(listed);
            transfer.ends = mark;
        }
        Ok(())
    }

    /// Begins to copy a segment of the first of these rows, as many as fit; returns their number.
    fn copy_some(
        &mut self,
        exec: &mut Exec,
        (kind, segment): (usize, usize),
        copies: &[BlockCopy],
        direction: Direction,
    ) -> Result<usize, OpError> {
        let Kind { slots, segments } = &self.kinds[kind];
        let (segment, stream) = (&segments[segment], first_stream(direction) + self.next);
        let (Staging { packed, rows }, at) = (&mut self.staging[stream], self.begun % SEGMENTS);
        let fit = (packed.elements() / segment.bytes).clamp(1, MAX_PACKED_ROWS).min(SEGMENTS - at);
        let copies = &copies[..copies.len().min(fit)];
        for (word, copy) in (at..).zip(copies) {
            self.words.store(word, copy.block);
        }
        let (words, sums) = (&self.words, SEGMENTS + SUM_WORDS * at);
        exec.on_copy_stream(stream, |exec| {
            rows.set_rows(copies.len());
            words.copy_out(exec.gpu()?, at, rows)?;
            let rows = PackedRows { rows, count: copies.len(), sums: (words, sums) };
            if direction == Direction::Load {
                copy_slots(exec, slots, segment, copies, packed, false)?;
                return unpack_rows(exec, segment, rows, packed);
            }
            pack_rows(exec, segment, rows, packed)?;
            copy_slots(exec, slots, segment, copies, packed, true)
        })?;
        self.begun += copies.len();
        self.next = (self.next + 1) % STREAMS;
        Ok(copies.len())
    }

    /// Ends a transfer, once nothing is copied any more.
    pub fn give_up(&mut self, exec: &mut Exec, id: TransferId) -> Result<(), OpError> {
        self.transfers.retain(|transfer| transfer.id != id);
        exec.gpu()?.finish_copies()
    }

    /// Number of blocks that can begin now.
    pub fn capacity(&self) -> usize {
        let segments = self.kinds.iter().map(|kind| kind.segments.len()).max().unwrap_or(1);
        // The last blocks of a transfer bring states, too.
        ((SEGMENTS - (self.begun - self.done)) / segments.max(1)).saturating_sub(64)
    }

    /// True once a transfer, all of which has begun, is done.
    pub fn is_done(&self, id: TransferId) -> Result<bool, OpError> {
        let transfer = self.transfers.iter().find(|transfer| transfer.id == id);
        transfer.and_then(|transfer| transfer.ends.as_ref()).map_or(Ok(true), CopyMark::is_reached)
    }

    /// The checksum of each block, and then of each state, of a transfer that is done, and the time of its copies,
    /// without that of steps and copies before them.
    pub fn take_sums(&mut self, id: TransferId) -> Result<(Vec<u64>, Option<Duration>), OpError> {
        let Some(at) = self.transfers.iter().position(|transfer| transfer.id == id) else {
            return Ok((Vec::new(), None));
        };
        let transfer = self.transfers.remove(at);
        let took = transfer.ends.map(|ends| ends.since(&transfer.begins)).transpose()?;
        let half = |word: usize| u64::from(self.words.load(word));
        let number = |word: usize| half(word) | half(word + 1) << 32;
        let sum_of = |segments: &Vec<usize>| {
            let places = segments.iter().map(|segment| SEGMENTS + SUM_WORDS * (segment % SEGMENTS));
            let both =
                places.fold([0u64; 2], |[a, b], at| [a.wrapping_add(number(at)), b.wrapping_add(number(at + 2))]);
            Checksum::of_sums(both)
        };
        let sums = transfer.copies.iter().map(sum_of).collect();
        let oldest = self.transfers.iter().filter_map(|transfer| transfer.copies.first()?.first()).min();
        self.done = oldest.copied().unwrap_or(self.begun);
        Ok((sums, took))
    }
}

/// The first of the streams of a direction.
fn first_stream(direction: Direction) -> usize {
    if direction == Direction::Load { STREAMS } else { 0 }
}

/// Copies a segment of each of these rows between `packed` and their slots, on the current stream.
fn copy_slots(
    exec: &mut Exec,
    slots: &PinnedSlots,
    segment: &PackSegment,
    copies: &[BlockCopy],
    packed: &mut Tensor,
    to_slots: bool,
) -> Result<(), OpError> {
    let mut done = 0;
    while let Some(copy) = copies.get(done) {
        let run =
            if slots.is_whole(segment.bytes) { slots.run(copies[done..].iter().map(|copy| copy.slot)) } else { 1 };
        let (at, bytes) = (done * segment.bytes, run * segment.bytes);
        let place = SlotBytes { at, slot: copy.slot, first: segment.first, bytes };
        slots.copy(exec.gpu()?, packed, place, to_slots)?;
        done += run;
    }
    Ok(())
}
