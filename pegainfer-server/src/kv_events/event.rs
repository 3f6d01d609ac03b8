//! KV events as vLLM encodes them: MessagePack, with events as maps or as arrays.

use pegainfer_core::images::hex;
use pegainfer_core::kv::{BlockImage, BlockImages, ContentName, Medium};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How events are encoded. Newer consumers read both, older ones arrays only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// An event is a map, with `type` for its name: vLLM since 2026.
    #[default]
    Map,
    /// An event is an array that begins with its name.
    Array,
}

impl Layout {
    /// Its name in the flag.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Array => "array",
        }
    }
}

/// A change of what an engine has cached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// Blocks can be found from now on.
    Stored(Run),
    /// Blocks are gone from a medium.
    Removed { medium: Medium, names: Vec<ContentName> },
    /// No block is left.
    Cleared,
}

/// Consecutive blocks of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    pub medium: Medium,
    /// Name of the adapter that computed them.
    pub adapter: Option<Arc<str>>,
    /// The block before them.
    pub parent: Option<ContentName>,
    pub names: Vec<ContentName>,
    /// Their tokens, `[names, tokens of a block]`.
    pub tokens: Vec<u32>,
    /// The images of each block, `[names]`.
    pub images: Vec<BlockImages>,
}

impl Event {
    /// Number of blocks that it is about.
    pub fn blocks(&self) -> usize {
        match self {
            Self::Stored(run) => run.names.len(),
            Self::Removed { names, .. } => names.len(),
            Self::Cleared => 1,
        }
    }
}

/// Fields of an event, in vLLM's order. The optional ones after them are left out, as they are where they are null.
#[derive(Serialize)]
#[serde(untagged)]
enum Wire<'a> {
    Stored {
        r#type: &'static str,
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: &'a [u32],
        block_size: usize,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    },
    Removed {
        r#type: &'static str,
        block_hashes: Vec<u64>,
        medium: &'static str,
    },
    Cleared {
        r#type: &'static str,
    },
}

/// An image of a block: its hash, as render routes give it, and the index of its first token, counted from the first
/// token of the block.
type ExtraKey = (String, i64);

/// What besides tokens tells the blocks of a run apart: for each block its images, or null. `None` if none has images.
/// The name of an adapter has its own field.
fn extra_keys(images: &[BlockImages]) -> Option<Vec<Option<Vec<ExtraKey>>>> {
    let key = |image: &BlockImage| (hex(&image.hash), image.offset);
    let keys = |images: &BlockImages| Some(images.as_deref()?.iter().map(key).collect());
    images.iter().any(Option::is_some).then(|| images.iter().map(keys).collect())
}

/// vLLM's name of a medium. The first tier has its name also where it is no GPU's memory: routers weigh tiers by name.
const fn medium_name(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "GPU",
        Medium::Host => "CPU",
        Medium::Disk => "STORAGE",
    }
}

fn hashes(names: &[ContentName]) -> Vec<u64> {
    names.iter().map(|name| name.low()).collect()
}

impl<'a> From<&'a Event> for Wire<'a> {
    fn from(event: &'a Event) -> Self {
        match event {
            Event::Stored(run) => Self::Stored {
                r#type: "BlockStored",
                block_hashes: hashes(&run.names),
                parent_block_hash: run.parent.map(ContentName::low),
                token_ids: &run.tokens,
                block_size: run.tokens.len() / run.names.len().max(1),
                lora_id: None,
                medium: medium_name(run.medium),
                lora_name: run.adapter.as_deref(),
                extra_keys: extra_keys(&run.images),
            },
            Event::Removed { medium, names } => {
                Self::Removed { r#type: "BlockRemoved", block_hashes: hashes(names), medium: medium_name(*medium) }
            }
            Event::Cleared => Self::Cleared { r#type: "AllBlocksCleared" },
        }
    }
}

/// A batch: `[time in Unix seconds, events, number of the engine]`, in either layout.
pub(super) fn encode(events: &[Event], time: f64, rank: u16, layout: Layout) -> Vec<u8> {
    let events: Vec<Wire<'_>> = events.iter().map(Wire::from).collect();
    let batch = (time, events, rank);
    let bytes = match layout {
        Layout::Map => rmp_serde::to_vec_named(&batch),
        Layout::Array => rmp_serde::to_vec(&batch),
    };
    bytes.expect("these types can be encoded, and memory can be written")
}

/// The events in groups of at most `blocks` blocks, in their order.
pub(super) fn split(events: Vec<Event>, blocks: usize) -> Vec<Vec<Event>> {
    let (mut groups, mut group, mut free) = (Vec::new(), Vec::new(), blocks);
    for event in events.into_iter().flat_map(|event| cut(event, blocks)) {
        if event.blocks() > free {
            groups.push(std::mem::take(&mut group));
            free = blocks;
        }
        free -= event.blocks().min(free);
        group.push(event);
    }
    if !group.is_empty() {
        groups.push(group);
    }
    groups
}

/// The event as several of at most `blocks` blocks.
fn cut(event: Event, blocks: usize) -> Vec<Event> {
    if event.blocks() <= blocks {
        return vec![event];
    }
    match event {
        Event::Cleared => vec![event],
        Event::Removed { medium, names } => {
            names.chunks(blocks).map(|names| Event::Removed { medium, names: names.to_vec() }).collect()
        }
        Event::Stored(run) => {
            let size = run.tokens.len() / run.names.len();
            let part = |first: usize| {
                let own = first..(first + blocks).min(run.names.len());
                Event::Stored(Run {
                    medium: run.medium,
                    adapter: run.adapter.clone(),
                    parent: first.checked_sub(1).map_or(run.parent, |before| Some(run.names[before])),
                    names: run.names[own.clone()].to_vec(),
                    tokens: run.tokens[own.start * size..own.end * size].to_vec(),
                    images: run.images[own].to_vec(),
                })
            };
            (0..run.names.len()).step_by(blocks).map(part).collect()
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::Value;
    use std::num::NonZeroU128;

    pub(crate) fn name(n: u64) -> ContentName {
        // The high half is not published.
        ContentName(NonZeroU128::new(u128::from(n) | 7 << 64).unwrap())
    }

    pub(crate) fn run(parent: Option<u64>, names: &[u64], tokens: &[u32]) -> Run {
        let (images, tokens) = (vec![None; names.len()], tokens.to_vec());
        let names = names.iter().copied().map(name).collect();
        Run { medium: Medium::Device, adapter: None, parent: parent.map(name), names, tokens, images }
    }

    pub(crate) fn block_images(images: &[([u8; 32], i64)]) -> BlockImages {
        Some(images.iter().map(|(hash, offset)| BlockImage { hash: *hash, offset: *offset }).collect())
    }

    /// The images of a block that a fixture describes.
    fn images(keys: &Value) -> BlockImages {
        let byte = |hash: &str, i: usize| u8::from_str_radix(&hash[2 * i..2 * i + 2], 16).unwrap();
        let image = |key: &Value| {
            let hash = key[0].as_str().unwrap();
            (std::array::from_fn(|i| byte(hash, i)), key[1].as_i64().unwrap())
        };
        block_images(&keys.as_array()?.iter().map(image).collect::<Vec<_>>())
    }

    /// The event that a fixture describes.
    fn event(described: &Value) -> Event {
        let numbers = |key: &str| -> Vec<u64> {
            described[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
        };
        let medium = || match described["medium"].as_str().unwrap() {
            "GPU" => Medium::Device,
            "CPU" => Medium::Host,
            _ => Medium::Disk,
        };
        match described["type"].as_str().unwrap() {
            "BlockStored" => {
                let tokens: Vec<u32> = numbers("token_ids").iter().map(|id| *id as u32).collect();
                let run = run(described["parent_block_hash"].as_u64(), &numbers("block_hashes"), &tokens);
                let images =
                    described["extra_keys"].as_array().map_or(run.images, |keys| keys.iter().map(images).collect());
                let adapter = described["lora_name"].as_str().map(Into::into);
                Event::Stored(Run { medium: medium(), adapter, images, ..run })
            }
            "BlockRemoved" => {
                Event::Removed { medium: medium(), names: numbers("block_hashes").into_iter().map(name).collect() }
            }
            _ => Event::Cleared,
        }
    }

    #[test]
    fn batches_have_the_bytes_of_msgspec() {
        let fixtures: Value = serde_json::from_str(include_str!("../../tests/fixtures/kv-events.json")).unwrap();
        let mut seen = 0;
        for fixture in fixtures.as_array().unwrap() {
            let events: Vec<Event> = fixture["events"].as_array().unwrap().iter().map(event).collect();
            let (time, rank) = (fixture["time"].as_f64().unwrap(), fixture["rank"].as_u64().unwrap() as u16);
            for (layout, key) in [(Layout::Map, "map"), (Layout::Array, "array")] {
                let bytes: String = encode(&events, time, rank, layout).iter().map(|b| format!("{b:02x}")).collect();
                assert_eq!(bytes, fixture[key].as_str().unwrap(), "{key} of {}", fixture["events"]);
                seen += 1;
            }
        }
        assert!(seen >= 10);
    }

    #[test]
    fn large_events_are_cut() {
        let tokens: Vec<u32> = (0..10).collect();
        let whole = Event::Stored(run(Some(9), &[1, 2, 3, 4, 5], &tokens));
        let removed = Event::Removed { medium: Medium::Device, names: vec![name(1)] };
        let groups = split(vec![whole, removed.clone(), Event::Cleared], 2);
        let stored = |parent, names: &[u64], tokens: &[u32]| Event::Stored(run(Some(parent), names, tokens));
        let expected = [
            vec![stored(9, &[1, 2], &[0, 1, 2, 3])],
            vec![stored(2, &[3, 4], &[4, 5, 6, 7])],
            vec![stored(4, &[5], &[8, 9]), removed],
            vec![Event::Cleared],
        ];
        assert_eq!(groups, expected);
        assert!(split(Vec::new(), 2).is_empty());
    }

    #[test]
    fn blocks_keep_their_images_when_an_event_is_cut() {
        let images = [None, block_images(&[([1; 32], 1)]), block_images(&[([1; 32], -1), ([2; 32], 1)])];
        let of = |parent, names: &[u64], tokens: &[u32], images: &[BlockImages]| {
            Event::Stored(Run { images: images.to_vec(), ..run(parent, names, tokens) })
        };
        let whole = of(None, &[1, 2, 3], &[7, 7, 7, 9, 9, 9], &images);
        let groups = split(vec![whole], 2);
        assert_eq!(groups[0], [of(None, &[1, 2], &[7, 7, 7, 9], &images[..2])]);
        assert_eq!(groups[1], [of(Some(2), &[3], &[9, 9], &images[2..])]);
        let key = |hash: &str, offset| (hash.repeat(32), offset);
        assert_eq!(
            extra_keys(&images[1..]),
            Some(vec![Some(vec![key("01", 1)]), Some(vec![key("01", -1), key("02", 1)])])
        );
        assert_eq!((extra_keys(&images[..1]), extra_keys(&images[..2]).unwrap()[0].clone()), (None, None));
    }
}
