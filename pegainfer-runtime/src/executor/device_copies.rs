//! Copies of KV blocks and states between a GPU and host memory, beside its steps.
//!
//! A block is packed into staging memory of the device and copied to its slot, or the other way, with the checksum of
//! its bytes as the device sees them. There are two streams for each direction: while one copies, the other packs.

use pegainfer_core::cuda::{CopyMark, HostWords, PinnedSlots};
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::tiers::{BlockCopy, Checksum, Direction, TransferId};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{PackPiece, pack_pieces, pack_rows, unpack_rows};

/// Streams for each direction.
const STREAMS: usize = 2;
/// Bytes of the staging memory of a stream: a block of most models.
const STAGING_BYTES: usize = 8 << 20;
/// Most pieces in flight.
const PIECES: usize = 32 << 10;
/// Words of the sums of a piece.
const SUM_WORDS: usize = 4;

/// Slots of host memory for blocks and for states, and the copies in flight.
#[derive(Debug)]
pub(super) struct DeviceCopies {
    /// Blocks, then states if the model has some.
    kinds: Vec<Kind>,
    /// Streams that store, then streams that load.
    streams: Vec<Staging>,
    /// Sums of the pieces in flight, piece `n` at `n % PIECES`.
    sums: HostWords,
    /// Number of pieces so far, and of those that are done.
    begun: usize,
    done: usize,
    /// Oldest first.
    transfers: Vec<InFlight>,
}

/// Slots for rows of some tensors.
#[derive(Debug)]
struct Kind {
    slots: PinnedSlots,
    pieces: Vec<PackPiece>,
}

#[derive(Debug)]
struct Staging {
    /// `[STAGING_BYTES]` u8.
    packed: Tensor,
    /// `[4]` u32.
    sums: Tensor,
}

/// A transfer that has begun.
#[derive(Debug)]
struct InFlight {
    id: TransferId,
    /// First pieces of its blocks and states, and how many pieces each has.
    copies: Vec<(usize, usize)>,
    /// Once all of it has begun.
    mark: Option<CopyMark>,
}

impl DeviceCopies {
    /// Host memory for so many rows of the tensors of blocks, and of those of states, of which there may be none.
    pub fn new(exec: &mut Exec, kinds: [(&[&mut Tensor], usize); 2]) -> Result<Self, OpError> {
        exec.open_copy_streams(2 * STREAMS)?;
        let mut opened = Vec::new();
        for (tensors, slots) in kinds.into_iter().filter(|(_, slots)| *slots > 0) {
            let pieces = pack_pieces(exec, tensors, STAGING_BYTES)?;
            let bytes = pieces.iter().map(|piece| piece.bytes).sum();
            opened.push(Kind { slots: PinnedSlots::new(exec.gpu()?, slots, bytes)?, pieces });
        }
        let streams = (0..2 * STREAMS).map(|_| Staging::new(exec)).collect::<Result<_, _>>()?;
        let sums = HostWords::new(exec.gpu()?, SUM_WORDS * PIECES)?;
        Ok(Self { kinds: opened, streams, sums, begun: 0, done: 0, transfers: Vec::new() })
    }

    /// The bytes of a block's slot.
    pub fn slot(&mut self, slot: u32) -> &mut [u8] {
        self.kinds[0].slots.slot(slot)
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
            self.transfers.push(InFlight { id, copies: Vec::new(), mark: None });
        }
        let mut listed = Vec::new();
        for (kind, copies) in self.kinds.iter().zip(copies) {
            let Kind { slots, pieces } = kind;
            for copy in copies {
                listed.push((self.begun, pieces.len()));
                for piece in pieces {
                    let stream = self.begun % STREAMS + if direction == Direction::Load { STREAMS } else { 0 };
                    let words = (&self.sums, self.begun % PIECES * SUM_WORDS);
                    let staging = &mut self.streams[stream];
                    exec.on_copy_stream(stream, |exec| {
                        staging.copy(exec, slots, piece, (*copy, direction), words)
                    })?;
                    self.begun += 1;
                }
            }
        }
        let first = if direction == Direction::Load { STREAMS } else { 0 };
        let mark = if ends { Some(exec.gpu()?.mark_copies(first, STREAMS)?) } else { None };
        if let Some(transfer) = self.transfers.iter_mut().find(|transfer| transfer.id == id) {
            transfer.copies.extend(listed);
            transfer.mark = mark;
        }
        Ok(())
    }

    /// Ends a transfer, once nothing is copied any more.
    pub fn give_up(&mut self, exec: &mut Exec, id: TransferId) -> Result<(), OpError> {
        self.transfers.retain(|transfer| transfer.id != id);
        exec.gpu()?.finish_copies()
    }

    /// Number of blocks that can begin now.
    pub fn room(&self) -> usize {
        let pieces = self.kinds.iter().map(|kind| kind.pieces.len()).max().unwrap_or(1);
        // The last blocks of a transfer bring states, too.
        ((PIECES - (self.begun - self.done)) / pieces.max(1)).saturating_sub(64)
    }

    /// True once a transfer, all of which has begun, is done.
    pub fn is_done(&self, id: TransferId) -> Result<bool, OpError> {
        let transfer = self.transfers.iter().find(|transfer| transfer.id == id);
        transfer.and_then(|transfer| transfer.mark.as_ref()).map_or(Ok(true), CopyMark::is_reached)
    }

    /// The checksum of each block, and then of each state, of a transfer that is done.
    pub fn take_sums(&mut self, id: TransferId) -> Vec<u64> {
        let Some(at) = self.transfers.iter().position(|transfer| transfer.id == id) else { return Vec::new() };
        let transfer = self.transfers.remove(at);
        let half = |word: usize| u64::from(self.sums.load(word));
        let number = |word: usize| half(word) | half(word + 1) << 32;
        let sum_of = |&(first, pieces): &(usize, usize)| {
            let words = (first..first + pieces).map(|piece| piece % PIECES * SUM_WORDS);
            let both = words.fold([0u64; 2], |[a, b], at| {
                [a.wrapping_add(number(at)), b.wrapping_add(number(at + 2))]
            });
            Checksum::of_sums(both)
        };
        let sums = transfer.copies.iter().map(sum_of).collect();
        let oldest = self.transfers.iter().filter_map(|transfer| transfer.copies.first()).map(|(first, _)| *first).min();
        self.done = oldest.unwrap_or(self.begun);
        sums
    }
}

impl Staging {
    fn new(exec: &mut Exec) -> Result<Self, OpError> {
        let mut tensor = |name, elements, dtype| {
            let tensor = exec.tensor(name, &[elements], dtype);
            tensor.map_err(|e| OpError { op: "host tier", message: e.to_string() })
        };
        Ok(Self { packed: tensor("packed", STAGING_BYTES, DType::U8)?, sums: tensor("sums", SUM_WORDS, DType::U32)? })
    }

    /// Copies a piece of a row on the current stream, and its sums to `words` from the given one on.
    fn copy(
        &mut self,
        exec: &mut Exec,
        slots: &PinnedSlots,
        piece: &PackPiece,
        (copy, direction): (BlockCopy, Direction),
        (words, first): (&HostWords, usize),
    ) -> Result<(), OpError> {
        let Self { packed, sums } = self;
        let (row, place) = (copy.block as usize, (copy.slot, piece.first, piece.bytes));
        if direction == Direction::Load {
            slots.copy_out(exec.gpu()?, packed, place)?;
            unpack_rows(exec, piece, row, packed, sums)?;
        } else {
            pack_rows(exec, piece, row, packed, sums)?;
            slots.copy_in(exec.gpu()?, packed, place)?;
        }
        words.copy_in(exec.gpu()?, first, sums)
    }
}
