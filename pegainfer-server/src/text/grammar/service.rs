//! Compiles the grammars of requests: few at the same time, within limits, and each source once.

use super::trial::{GrammarLimits, GrammarTrial};
use super::{
    COMPILER_STACK, GrammarCompiler, GrammarError, GrammarSource, bounds, lower_priority, no_thread, panicked,
    thread_with,
};
use crate::text::recorded_grammar::ReasoningLimits;
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::logits_processors::TokenMask;
use ring::digest::{SHA256, digest};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Grammars that are compiled at the same time; most take milliseconds, so that the queue for a slot is short.
const SLOTS: usize = 2;
/// Sources that are checked at the same time, which takes a fraction of a second for the largest.
const CHECKS: usize = 4;
/// Grammars that are kept for later requests: the tools of an agent come with each of its requests.
const CACHED: usize = 64;
/// Grammars of the largest allowed size that may be in memory.
const LARGEST: u32 = 2;
/// Time to wait for the memory of other requests' grammars.
const WAIT: Duration = Duration::from_secs(5);

/// SHA-256 of a source.
type Key = [u8; 32];

/// The compiler behind its limits.
pub struct GrammarService {
    compiler: Arc<GrammarCompiler>,
    trial: Option<GrammarTrial>,
    checks: Arc<Semaphore>,
    slots: Arc<Semaphore>,
    /// One permit for each MiB that compiled grammars may take.
    memory: Arc<Semaphore>,
    /// Most recently used last.
    cache: Mutex<Vec<(Key, Arc<dyn Grammar>)>>,
}

impl GrammarService {
    /// Without a `trial`, only the sources are checked.
    pub fn new(compiler: GrammarCompiler, trial: Option<GrammarTrial>) -> Self {
        let limits = trial.as_ref().map_or_else(GrammarLimits::default, |trial| trial.limits);
        Self {
            compiler: Arc::new(compiler),
            trial,
            checks: Arc::new(Semaphore::new(CHECKS)),
            slots: Arc::new(Semaphore::new(SLOTS)),
            memory: Arc::new(Semaphore::new((limits.mebibytes() as usize).saturating_mul(LARGEST as usize))),
            cache: Mutex::default(),
        }
    }

    /// Whether the vocabulary has the reasoning tags, which [`after_reasoning`](Self::after_reasoning) needs.
    pub fn knows_reasoning(&self) -> bool {
        self.compiler.knows_reasoning()
    }

    /// See [`GrammarCompiler::after_reasoning`].
    pub fn after_reasoning(
        &self,
        thinking: ReasoningLimits,
        output: Option<Arc<dyn Grammar>>,
    ) -> Option<Arc<dyn Grammar>> {
        self.compiler.after_reasoning(thinking, output)
    }

    /// Compiles a source, off the async threads. Dropping the future ends the trial; what is left after it is short, and keeps
    /// its slot until it is done.
    ///
    /// # Errors
    /// What is wrong with the source, or that the machine is busy.
    pub async fn compile(&self, source: GrammarSource) -> Result<Arc<dyn Grammar>, GrammarError> {
        let (lark, key) = on_thread(permit(&self.checks).await?, move || {
            let lark = source.into_lark()?;
            bounds::check(&lark)?;
            let mut key = Key::default();
            key.copy_from_slice(digest(&SHA256, lark.as_bytes()).as_ref());
            Ok((lark, key))
        })
        .await?;
        if let Some(grammar) = self.cached(&key) {
            return Ok(grammar);
        }
        let slot = permit(&self.slots).await?;
        let mebibytes = match &self.trial {
            Some(trial) => trial.try_out(&lark).await?,
            None => 1,
        };
        let memory = self.reserve(mebibytes).await?;
        let compiler = self.compiler.clone();
        let grammar = on_thread(slot, move || {
            let inner = compiler.compile_here(lark)?;
            Ok(Arc::new(Accounted { inner, _memory: memory }) as Arc<dyn Grammar>)
        })
        .await?;
        self.keep(key, &grammar);
        Ok(grammar)
    }

    /// Memory for a grammar; cached ones make way.
    async fn reserve(&self, mebibytes: u32) -> Result<OwnedSemaphorePermit, GrammarError> {
        let (memory, busy) =
            (self.memory.clone(), "the grammars of other requests take all of the memory for grammars");
        if let Ok(permit) = memory.clone().try_acquire_many_owned(mebibytes) {
            return Ok(permit);
        }
        self.cache().clear();
        match tokio::time::timeout(WAIT, memory.acquire_many_owned(mebibytes)).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(GrammarError::Busy(format!("{busy} (--max-grammar-memory)"))),
        }
    }

    fn cached(&self, key: &Key) -> Option<Arc<dyn Grammar>> {
        let mut cache = self.cache();
        let at = cache.iter().position(|(cached, _)| cached == key)?;
        let entry = cache.remove(at);
        let grammar = entry.1.clone();
        cache.push(entry);
        Some(grammar)
    }

    fn keep(&self, key: Key, grammar: &Arc<dyn Grammar>) {
        let mut cache = self.cache();
        cache.retain(|(cached, _)| *cached != key);
        if cache.len() == CACHED {
            cache.remove(0);
        }
        cache.push((key, grammar.clone()));
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Vec<(Key, Arc<dyn Grammar>)>> {
        // A panic cannot leave it half-changed.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A grammar with the permits of its memory.
#[derive(Debug)]
struct Accounted {
    inner: Arc<dyn Grammar>,
    _memory: OwnedSemaphorePermit,
}

impl Grammar for Accounted {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        self.inner.start()
    }

    fn source(&self) -> String {
        self.inner.source()
    }
}

async fn permit(of: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, GrammarError> {
    of.clone().acquire_owned().await.map_err(|e| GrammarError::Busy(e.to_string()))
}

/// Runs `work` on a thread with a large stack. The thread keeps the permit until the work is done, whoever waits for it.
async fn on_thread<T: Send + 'static>(
    permit: OwnedSemaphorePermit,
    work: impl FnOnce() -> Result<T, GrammarError> + Send + 'static,
) -> Result<T, GrammarError> {
    let (done, result) = oneshot::channel();
    let thread = thread_with(COMPILER_STACK).spawn(move || {
        let _permit = permit;
        lower_priority();
        // Nobody may be waiting any more.
        let _ = done.send(work());
    });
    thread.map_err(no_thread)?;
    // A panic drops the sender.
    result.await.unwrap_or_else(|_| Err(panicked()))
}
