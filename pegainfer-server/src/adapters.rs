//! The adapters that requests may name: where they are, and which of them are in memory.
//!
//! A name belongs to a path. The matrices of at most a given number of adapters stay in memory; the least recently used
//! ones are read again when a request names them.

use pegainfer_core::adapter::{Adapter, AdapterId};
use pegainfer_runtime::{AdapterError, AdapterLoader, LoadedAdapter};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names of adapters, and the adapters.
#[derive(Debug)]
pub struct Adapters {
    loader: AdapterLoader,
    /// Requests may load adapters from this folder only; from none without it.
    root: Option<PathBuf>,
    /// Maximum number of adapters in memory.
    max_in_memory: usize,
    /// Maximum number of adapters in one step.
    pub max_loras: usize,
    names: Mutex<Names>,
    /// Held while an adapter is read, so that requests for the same one read it once.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Names {
    entries: BTreeMap<String, Entry>,
    /// Number of uses so far.
    uses: u64,
}

/// One name.
#[derive(Debug)]
struct Entry {
    card: AdapterCard,
    /// `None` if it is not in memory.
    adapter: Option<Arc<Adapter>>,
    /// Number of its last use.
    last: u64,
    /// Requests that wait, and requests that run.
    open: [usize; 2],
}

/// Facts about an adapter.
#[derive(Debug, Clone)]
pub struct AdapterCard {
    /// Name of the adapter.
    pub name: String,
    /// Where it was loaded from.
    pub path: PathBuf,
    /// Its largest rank.
    pub rank: usize,
    /// Number of matrices that it changes.
    pub modules: usize,
    /// Bytes of it in memory.
    pub bytes: usize,
}

/// Where an adapter is.
#[derive(Debug)]
enum Place {
    Memory(Arc<Adapter>),
    Disk(PathBuf),
}

/// Why a request to load an adapter is refused before its files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadPath {
    /// The server takes no paths from requests.
    NoRoot,
    /// The path is outside of the folder, or does not exist.
    Outside,
}

impl Adapters {
    /// No adapters. At most `max_in_memory` of them stay in memory; requests may load from the folder `root`.
    pub fn new(loader: AdapterLoader, max_loras: usize, max_in_memory: usize, root: Option<PathBuf>) -> Self {
        let (names, reading) = (Mutex::default(), tokio::sync::Mutex::default());
        Self { loader, root, max_in_memory: max_in_memory.max(1), max_loras, names, reading }
    }

    /// Reads the adapter at `path` and gives it this name, in place of one that has it. Blocks.
    pub fn load(&self, name: &str, path: &Path) -> Result<Arc<Adapter>, AdapterError> {
        let LoadedAdapter { adapter, rank, modules, bytes, skipped } = self.loader.load(path)?;
        if let Some((tensors, purpose)) = skipped {
            log::warn!(
                "the adapter {name} also changes {purpose}, which is not served: {tensors} tensors are not loaded"
            );
        }
        let (megabytes, from) = (bytes as f64 / 1e6, path.display());
        log::info!("adapter {name} from {from}: rank {rank}, {modules} matrices, {megabytes:.1} MB");
        let card = AdapterCard { name: name.to_owned(), path: path.to_owned(), rank, modules, bytes };
        let mut names = self.names();
        names.uses += 1;
        let open = names.entries.get(name).map_or([0; 2], |entry| entry.open);
        let entry = Entry { card, adapter: Some(adapter.clone()), last: names.uses, open };
        names.entries.insert(name.to_owned(), entry);
        names.forget_oldest(self.max_in_memory);
        Ok(adapter)
    }

    /// Reads an adapter again that is not in memory. Its name may be gone meanwhile. Blocks.
    fn read_again(&self, name: &str, path: &Path) -> Result<Arc<Adapter>, AdapterError> {
        let adapter = self.loader.load(path)?.adapter;
        let mut names = self.names();
        if let Some(entry) = names.entries.get_mut(name).filter(|entry| entry.card.path == path) {
            entry.adapter = Some(adapter.clone());
        }
        names.forget_oldest(self.max_in_memory);
        Ok(adapter)
    }

    /// Takes a name away: new requests do not find it, and running ones end as they would. False if there is no such
    /// name.
    pub fn unload(&self, name: &str) -> bool {
        self.names().entries.remove(name).is_some()
    }

    /// The adapter with this name, read again if it is not in memory; `None` if there is no such name.
    pub async fn get(self: &Arc<Self>, name: &str) -> Option<Result<Arc<Adapter>, AdapterError>> {
        if let Place::Memory(adapter) = self.find(name)? {
            return Some(Ok(adapter));
        }
        let _reading = self.reading.lock().await;
        match self.find(name)? {
            Place::Memory(adapter) => Some(Ok(adapter)),
            Place::Disk(path) => {
                let (all, name) = (self.clone(), name.to_owned());
                // It fails only if the task panics, which it does not.
                tokio::task::spawn_blocking(move || all.read_again(&name, &path)).await.ok()
            }
        }
    }

    fn find(&self, name: &str) -> Option<Place> {
        let mut names = self.names();
        names.uses += 1;
        let uses = names.uses;
        let entry = names.entries.get_mut(name)?;
        entry.last = uses;
        Some(entry.adapter.clone().map_or_else(|| Place::Disk(entry.card.path.clone()), Place::Memory))
    }

    /// True if an adapter has this name.
    pub fn has(&self, name: &str) -> bool {
        self.names().entries.contains_key(name)
    }

    /// Name of the adapter with this number, while it is in memory.
    pub fn name_of(&self, id: AdapterId) -> Option<String> {
        let names = self.names();
        let mut entries = names.entries.iter();
        let has_id = |entry: &Entry| entry.adapter.as_ref().is_some_and(|adapter| adapter.id() == id);
        entries.find(|(_, entry)| has_id(entry)).map(|(name, _)| name.clone())
    }

    /// All adapters, by name.
    pub fn cards(&self) -> Vec<AdapterCard> {
        self.names().entries.values().map(|entry| entry.card.clone()).collect()
    }

    /// The path that a request names, if it lies in the folder for them. A relative path begins there.
    pub fn path_for_request(&self, path: &str) -> Result<PathBuf, BadPath> {
        let root = self.root.as_ref().ok_or(BadPath::NoRoot)?;
        // Links are followed, so that none leads out.
        let resolve = |path: &Path| path.canonicalize().map_err(|_| BadPath::Outside);
        let (root, path) = (resolve(root)?, resolve(&root.join(path))?);
        if path.starts_with(&root) && path != root { Ok(path) } else { Err(BadPath::Outside) }
    }

    /// Names of adapters of requests that wait, and of those that run.
    pub fn open_names(&self) -> [Vec<String>; 2] {
        let names = self.names();
        [0, 1].map(|state| {
            let open = names.entries.iter().filter(|(_, entry)| entry.open[state] > 0);
            open.map(|(name, _)| name.clone()).collect()
        })
    }

    /// Counts a request with this adapter among the waiting ones.
    pub fn open(self: &Arc<Self>, name: &str) -> OpenAdapter {
        self.count(name, 0, 1);
        OpenAdapter { adapters: self.clone(), name: name.to_owned(), state: 0 }
    }

    fn count(&self, name: &str, state: usize, change: isize) {
        if let Some(entry) = self.names().entries.get_mut(name) {
            entry.open[state] = entry.open[state].saturating_add_signed(change);
        }
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        // Nothing that can panic runs under the lock.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Names {
    /// Drops the least recently used adapters, until at most `most` are in memory.
    fn forget_oldest(&mut self, most: usize) {
        let mut held: Vec<&mut Entry> = self.entries.values_mut().filter(|entry| entry.adapter.is_some()).collect();
        let surplus = held.len().saturating_sub(most);
        held.sort_by_key(|entry| entry.last);
        held.into_iter().take(surplus).for_each(|entry| entry.adapter = None);
    }
}

/// An open request with an adapter, counted until it is dropped.
#[derive(Debug)]
pub struct OpenAdapter {
    adapters: Arc<Adapters>,
    name: String,
    state: usize,
}

impl OpenAdapter {
    /// The request runs from now on.
    pub fn admitted(&mut self) {
        if self.state == 0 {
            self.adapters.count(&self.name, 0, -1);
            self.adapters.count(&self.name, 1, 1);
            self.state = 1;
        }
    }
}

impl Drop for OpenAdapter {
    fn drop(&mut self) {
        self.adapters.count(&self.name, self.state, -1);
    }
}
