//! Finds the rows that several ranks need, which the feed reads once.

use super::request::Request;
use crate::weights::feed::{Chunk, Feed, FeedLimits};
use std::collections::HashMap;
use std::ops::Range;
use std::slice::Iter;
use std::sync::Arc;

/// Rows of a stored tensor that a chunk of the feed has.
#[derive(Debug)]
pub(in crate::weights) struct Span {
    pub rows: Range<usize>,
    pub chunk: usize,
}

/// The rows of a request that come from the feed.
#[derive(Debug)]
pub(in crate::weights) struct RequestSpans {
    /// Name of the tensor.
    name: Arc<str>,
    spans: Vec<Span>,
}

/// What a loader does with the parts of a checkpoint that are requested.
#[derive(Debug)]
pub(in crate::weights) enum Reads<'a> {
    /// It reads them from the files.
    Direct,
    /// It notes them, on `Meta`.
    Listed(Vec<Request<'a>>),
    /// It reads them from the feed, or from the files where no other rank needs them. Iterates over the spans of the
    /// coming requests.
    Shared(&'a Feed<'a>, Iter<'a, RequestSpans>),
}

impl<'a> Reads<'a> {
    /// The feed, and the spans of the next request, for the tensor `name`.
    pub fn next(&mut self, name: &str) -> Option<(&'a Feed<'a>, &'a [Span])> {
        let Self::Shared(feed, requests) = self else { return None };
        let next = requests.next().filter(|next| *next.name == *name);
        let Some(RequestSpans { spans, .. }) = next else { panic!("{name}: not requested at this place before") };
        Some((feed, spans))
    }
}

/// The feed of all ranks, and the part of each.
#[derive(Debug)]
pub(in crate::weights) struct SharedReads<'a> {
    pub feed: Feed<'a>,
    ranks: Vec<Vec<RequestSpans>>,
}

/// A request that may take rows from the feed.
#[derive(Debug, Clone, Copy)]
struct Taker<'r, 'a> {
    rank: usize,
    number: usize,
    request: &'r Request<'a>,
}

impl<'a> SharedReads<'a> {
    /// The rows that at least two of these requests need. `ranks` are the requests of each rank in the order in which
    /// it reads them.
    pub fn new(ranks: &[Vec<Request<'a>>], limits: FeedLimits) -> Self {
        let none = |request: &Request<'_>| RequestSpans { name: request.name.clone(), spans: Vec::new() };
        let mut spans: Vec<Vec<_>> = ranks.iter().map(|requests| requests.iter().map(none).collect()).collect();
        let mut chunks = Vec::new();
        for takers in takers(ranks).iter().filter(|takers| takers.len() > 1) {
            cut(takers, limits.chunk_bytes, &mut chunks, &mut spans);
        }
        Self { feed: Feed::new(chunks, limits.chunks), ranks: spans }
    }

    /// The reads of a rank.
    pub fn rank<'s>(&'s self, rank: usize) -> Reads<'s> {
        Reads::Shared(&self.feed, self.ranks[rank].iter())
    }
}

/// Cuts the rows that several requests of one tensor need into chunks.
fn cut<'a>(takers: &[Taker<'_, 'a>], chunk_bytes: usize, chunks: &mut Vec<Chunk<'a>>, spans: &mut [Vec<RequestSpans>]) {
    let Request { name, stored, row, .. } = takers[0].request;
    let at_once = (chunk_bytes / row).max(1);
    let mut edges: Vec<usize> =
        takers.iter().flat_map(|taker| [taker.request.rows.start, taker.request.rows.end]).collect();
    edges.sort_unstable();
    edges.dedup();
    for edge in edges.windows(2) {
        let needs = |taker: &&Taker<'_, '_>| taker.request.rows.start <= edge[0] && edge[1] <= taker.request.rows.end;
        let takers: Vec<_> = takers.iter().filter(needs).collect();
        if takers.len() < 2 {
            continue;
        }
        let width: usize = takers.iter().map(|taker| taker.request.columns.len()).sum();
        for first in (edge[0]..edge[1]).step_by(at_once) {
            let rows = first..edge[1].min(first + at_once);
            for Taker { rank, number, .. } in &takers {
                spans[*rank][*number].spans.push(Span { rows: rows.clone(), chunk: chunks.len() });
            }
            chunks.push(Chunk {
                name: name.clone(),
                stored: *stored,
                first: first * row,
                bytes: rows.len() * row,
                copied: rows.len() * width,
            });
        }
    }
}

/// The requests of each tensor, in an order of tensors that all ranks follow. A request that its rank makes against
/// this order is left out: it could wait for a chunk that is read only after this rank has taken a later one. Tiled
/// tensors are left out because chunks are copied by ranges of columns.
fn takers<'r, 'a>(ranks: &'r [Vec<Request<'a>>]) -> Vec<Vec<Taker<'r, 'a>>> {
    let positions = positions(ranks);
    let tensors = positions.iter().flatten().max().map_or(0, |last| last + 1);
    let mut takers = vec![Vec::new(); tensors];
    for (rank, (requests, positions)) in ranks.iter().zip(&positions).enumerate() {
        let mut after = (0, 0);
        for (number, (request, position)) in requests.iter().zip(positions).enumerate() {
            let in_order = (*position, request.rows.start) >= after && request.bytes() > 0;
            if in_order && !request.stored.is_tiled() {
                after = (*position, request.rows.end);
                takers[*position].push(Taker { rank, number, request });
            }
        }
    }
    takers
}

/// For each request of each rank, the position of its tensor in an order of all tensors. A tensor that earlier ranks do
/// not have comes after the one that its rank requests before it.
fn positions(ranks: &[Vec<Request<'_>>]) -> Vec<Vec<usize>> {
    // A linked list of tensors: the number of the next one. Number 0 is before the first tensor and after the last.
    let (mut next, mut numbers) = (vec![0], HashMap::new());
    let mut list = |requests: &Vec<Request<'_>>| {
        let mut before = 0;
        let mut number = |request: &Request<'_>| {
            // Tensors that are read in two formats are two tensors.
            let key = (request.name.clone(), request.row, request.stored.is_rounded());
            before = *numbers.entry(key).or_insert_with(|| {
                next.push(next[before]);
                next[before] = next.len() - 1;
                next.len() - 1
            });
            before
        };
        requests.iter().map(&mut number).collect::<Vec<usize>>()
    };
    let mut ranks: Vec<Vec<usize>> = ranks.iter().map(&mut list).collect();
    let mut positions = vec![0; next.len()];
    let mut tensor = next[0];
    for position in 0..next.len() - 1 {
        positions[tensor] = position;
        tensor = next[tensor];
    }
    ranks.iter_mut().flatten().for_each(|number| *number = positions[*number]);
    ranks
}
