//! Compiles the grammars of requests: a few at a time, within limits, and each source once.

use super::grammar_cache::{AccountedGrammar, Cached, GrammarCache, Key};
use super::priority::lower_priority;
use super::trial::{GrammarLimits, GrammarTrial};
use crate::fair_queue::{MAX_WAIT, Permits, QueueError, QueueLimits, Slots};
use crate::tenant::Tenant;
use pegainfer_core::grammar::Grammar;
use pegainfer_models::engine_grammar::EngineGrammar;
use pegainfer_text::{COMPILER_STACK, GrammarCompiler, GrammarError, GrammarSource, ReasoningLimits};
use ring::digest::{SHA256, digest};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Grammars compiled at the same time, over all tenants and per tenant. Most take milliseconds, the largest take a
/// second.
const SLOTS: usize = 3;
const SLOTS_PER_TENANT: usize = 2;
/// Sources checked at the same time, over all tenants and per tenant. The largest take a fraction of a second.
const CHECKS: usize = 4;
const CHECKS_PER_TENANT: usize = 3;
/// Number of largest allowed grammars that fit in memory. One tenant leaves a quarter of that memory to the others.
const MAX_LARGE_GRAMMARS: u32 = 2;
/// Time to wait for the memory of other requests' grammars.
const MEMORY_WAIT: Duration = Duration::from_secs(5);

/// The compiler with its limits.
pub struct GrammarService {
    compiler: Arc<GrammarCompiler>,
    trial: Option<GrammarTrial>,
    checks: Slots,
    slots: Slots,
    /// One permit per MiB of compiled grammars.
    memory: Slots,
    cache: Mutex<GrammarCache>,
}

impl GrammarService {
    /// Without a `trial`, only the sources are checked.
    pub fn new(compiler: GrammarCompiler, trial: Option<GrammarTrial>) -> Self {
        let limits = trial.as_ref().map_or_else(GrammarLimits::default, |trial| trial.limits);
        let memory = (limits.mebibytes() as usize).saturating_mul(MAX_LARGE_GRAMMARS as usize);
        let slots = |permits, per_tenant, max_wait| Slots::new(QueueLimits::new(permits, per_tenant), max_wait);
        Self {
            compiler: Arc::new(compiler),
            trial,
            checks: slots(CHECKS, CHECKS_PER_TENANT, MAX_WAIT),
            slots: slots(SLOTS, SLOTS_PER_TENANT, MAX_WAIT),
            memory: slots(memory, memory / 4 * 3, MEMORY_WAIT),
            cache: Mutex::default(),
        }
    }

    /// True if the vocabulary has the reasoning tags. Without them no grammar can cover the reasoning.
    pub fn has_reasoning_tags(&self) -> bool {
        self.compiler.has_reasoning_tags()
    }

    /// The engine's grammar: reasoning within `thinking`, if the model has the tags for it, then the output. `None`
    /// allows any text.
    pub fn for_engine(
        &self,
        thinking: Option<ReasoningLimits>,
        output: Option<Arc<AccountedGrammar>>,
    ) -> Option<Arc<dyn Grammar>> {
        let compiled = output.as_ref().map(|output| output.grammar.clone());
        let reasoned = thinking.and_then(|thinking| self.compiler.after_reasoning(thinking, compiled.clone()));
        let grammar = reasoned.map(pegainfer_text::Grammar::Reasoned);
        let grammar = grammar.or(compiled.map(pegainfer_text::Grammar::Compiled))?;
        Some(Arc::new(EngineGrammar::keeping(grammar, output)))
    }

    /// Compiles a source, off the async threads. Dropping the future ends the trial. The work after the trial is short
    /// and keeps its slot until it is done.
    ///
    /// # Errors
    /// The source is faulty, or the machine is busy.
    pub async fn compile(&self, tenant: Tenant, source: GrammarSource) -> Result<Arc<AccountedGrammar>, GrammarError> {
        let check = self.checks.acquire(tenant, 1).await.map_err(|error| busy(&error))?;
        let (lark, key) = on_thread(check, move || {
            let lark = source.into_checked_lark()?;
            let mut key = Key::default();
            key.copy_from_slice(digest(&SHA256, lark.as_bytes()).as_ref());
            Ok((lark, key))
        })
        .await?;
        if let Some(grammar) = self.cache().get(&key) {
            return Ok(grammar);
        }
        let slot = self.slots.acquire(tenant, 1).await.map_err(|error| busy(&error))?;
        // Another request may have compiled it in the meantime.
        if let Some(grammar) = self.cache().get(&key) {
            return Ok(grammar);
        }
        let mebibytes = match &self.trial {
            Some(trial) => trial.try_out(&lark).await?,
            None => 1,
        };
        // Memory is freed when other requests end. Do not occupy a slot while waiting for it.
        drop(slot);
        let memory = self.reserve(tenant, mebibytes as usize).await?;
        let slot = self.slots.acquire(tenant, 1).await.map_err(|error| busy(&error))?;
        let compiler = self.compiler.clone();
        let grammar = on_thread(slot, move || {
            let grammar = Arc::new(compiler.compile_checked(lark)?);
            Ok(Arc::new(AccountedGrammar { grammar, _memory: memory }))
        })
        .await?;
        self.cache().insert(Cached { key, tenant, mebibytes: mebibytes as usize, grammar: grammar.clone() });
        Ok(grammar)
    }

    /// Reserves memory for a grammar, and evicts as few cached grammars as possible.
    async fn reserve(&self, tenant: Tenant, mebibytes: usize) -> Result<Permits, GrammarError> {
        // Memory of evicted grammars that is freed when the requests that use them end.
        let mut expected = 0;
        while expected < mebibytes {
            if let Some(memory) = self.memory.try_acquire(tenant, mebibytes) {
                return Ok(memory);
            }
            let has_its_share = !self.memory.may_hold(tenant, mebibytes);
            let Some(evicted) = self.cache().evict(tenant, has_its_share) else { break };
            if Arc::strong_count(&evicted.grammar) > 1 {
                expected += evicted.mebibytes;
            }
        }
        self.memory.acquire(tenant, mebibytes).await.map_err(|error| {
            let message = "the grammars of other requests take all of the memory for grammars (--max-grammar-memory)";
            GrammarError::Busy(format!("{message}: {error}"))
        })
    }

    fn cache(&self) -> MutexGuard<'_, GrammarCache> {
        // A panic cannot leave it half-changed.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn busy(error: &QueueError) -> GrammarError {
    GrammarError::Busy(format!("other grammars are compiled first: {error}"))
}

/// Runs `work` on a thread with a large stack. The thread keeps the permit until the work is done, even if nobody waits
/// for it.
async fn on_thread<T: Send + 'static>(
    permit: Permits,
    work: impl FnOnce() -> Result<T, GrammarError> + Send + 'static,
) -> Result<T, GrammarError> {
    let (done, result) = oneshot::channel();
    let thread = std::thread::Builder::new().name("grammar".into()).stack_size(COMPILER_STACK).spawn(move || {
        let _permit = permit;
        lower_priority();
        // The receiver may be gone.
        let _ = done.send(work());
    });
    thread.map_err(|error| GrammarError::no_thread(&error))?;
    // A panic drops the sender.
    result.await.unwrap_or_else(|_| Err(GrammarError::panicked()))
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use crate::testing;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    const ONE: Tenant = Tenant { id: 1, has_key: false };
    const OTHER: Tenant = Tenant { id: 2, has_key: false };

    fn compiler() -> GrammarCompiler {
        GrammarCompiler::new(Arc::new(testing::tokenizer()), 4100, vec![4089])
    }

    /// A trial run by this script, with 8 MiB for all grammars.
    fn scripted(name: &str, script: &str) -> (GrammarService, PathBuf) {
        let program = std::env::temp_dir().join(format!("pegainfer-trial-{name}-{}", std::process::id()));
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let limits = GrammarLimits { memory: 4 << 20, time: Duration::from_secs(6) };
        let trial = GrammarTrial { program: program.clone(), limits };
        (GrammarService::new(compiler(), Some(trial)), program)
    }

    async fn compile(
        service: &GrammarService,
        tenant: Tenant,
        text: &str,
    ) -> Result<Arc<AccountedGrammar>, GrammarError> {
        service.compile(tenant, GrammarSource::Lark(format!("start: \"{text}\""))).await
    }

    #[tokio::test]
    async fn many_grammars_of_one_tenant_evict_only_its_own() {
        let service = GrammarService::new(compiler(), None);
        let first = compile(&service, ONE, "one").await.unwrap();
        for i in 0..70 {
            compile(&service, OTHER, &format!("other {i}")).await.unwrap();
        }
        assert!(Arc::ptr_eq(&first, &compile(&service, ONE, "one").await.unwrap()), "it is still cached");
        assert_eq!(service.memory.free(), 512 - 64);
    }

    #[tokio::test]
    async fn large_grammars_of_one_tenant_leave_the_memory_of_another_s() {
        let (service, program) = scripted("large", "cat >/dev/null; echo ok 3");
        drop(compile(&service, ONE, "one").await.unwrap());
        for i in 0..4 {
            let other = compile(&service, OTHER, &format!("other {i}")).await.unwrap();
            drop(other);
        }
        let cached = |tenant| service.cache().count(tenant);
        assert_eq!((service.memory.free(), cached(ONE), cached(OTHER)), (2, 1, 1));
        let used = compile(&service, OTHER, "used").await.unwrap();
        let of_one = compile(&service, ONE, "another one").await.unwrap();
        assert_eq!((service.memory.free(), cached(ONE)), (2, 1), "its own made way");
        drop((used, of_one));
        std::fs::remove_file(program).unwrap();
    }

    #[tokio::test]
    async fn who_waits_for_memory_holds_no_slot() {
        let (service, program) = scripted("waits", "cat >/dev/null; echo ok 4");
        let held = [compile(&service, ONE, "one").await.unwrap(), compile(&service, OTHER, "other").await.unwrap()];
        {
            let mut waiting = std::pin::pin!(compile(&service, OTHER, "another"));
            let _ = tokio::time::timeout(Duration::from_millis(500), waiting.as_mut()).await;
            assert_eq!((service.slots.free(), service.memory.free()), (SLOTS, 0));
            drop(held);
            waiting.await.unwrap();
        }
        std::fs::remove_file(program).unwrap();
    }

    #[tokio::test]
    async fn a_trial_that_others_ended_is_not_the_grammar_s_fault() {
        for (signal, is_limit) in [("XCPU", true), ("ABRT", true), ("KILL", false), ("SEGV", false), ("TERM", false)] {
            let (service, program) = scripted(signal, &format!("cat >/dev/null; kill -{signal} $$"));
            let error = compile(&service, ONE, "one").await.unwrap_err();
            let text = error.to_string();
            match error {
                GrammarError::Limit(_) if is_limit => assert!(text.contains("(--max-grammar-"), "{text}"),
                GrammarError::Busy(_) if !is_limit => assert!(text.contains("signal: ") && text.contains("try again")),
                _ => panic!("{signal}: {error:?}"),
            }
            assert_eq!((service.slots.free(), service.memory.free()), (SLOTS, 8), "{signal}");
            std::fs::remove_file(program).unwrap();
        }
    }
}
