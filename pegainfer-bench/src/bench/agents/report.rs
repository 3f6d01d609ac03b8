//! The figures of the sessions as a table and as JSON.

use super::turn::Turn;
use super::verify::Comparison;
use crate::bench::percentiles::Percentiles;
use crate::bench::report::{milliseconds, number, plural};
use serde::Serialize;
use std::fmt::Write;

/// Maximum number of rows for the turns after the first one.
const MAX_ROWS: usize = 9;

/// The report of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of this program.
    pub version: &'static str,
    /// Always `agents`.
    pub workload: &'static str,
    /// Name of the model.
    pub model: String,
    /// The server's address.
    pub target: String,
    /// Seed of texts and think times.
    pub seed: u64,
    /// Number of sessions.
    pub sessions: usize,
    /// Number of turns of a session.
    pub session_turns: usize,
    /// Number of sub-agents of a session.
    pub subagents: usize,
    /// Mean number of tokens in a word of the texts.
    pub tokens_per_word: f64,
    /// Number of sessions and sub-agents that failed before their end.
    pub failed: usize,
    /// Time from the first request to the last answer, in seconds.
    pub wall_s: f64,
    /// Generated tokens per second, over all sessions.
    pub output_tok_s: f64,
    /// Turns of the same size together.
    pub rows: Vec<Row>,
    /// All turns together.
    pub total: Row,
    /// Number of sessions that named the code word of their first tool result at the end; means nothing for random
    /// weights.
    pub needles_found: usize,
    /// Answers without the prefix cache, if they were asked for.
    pub exactness: Option<Comparison>,
    /// Every turn.
    pub turns: Vec<Turn>,
}

/// Figures of several turns.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Name of the row in the table.
    pub name: String,
    /// Number of requests.
    pub requests: usize,
    /// Prompt tokens, mean per request.
    pub prompt_tokens: f64,
    /// Time to first token (TTFT).
    pub ttft_ms: Percentiles,
    /// Longest time to first token.
    pub ttft_max_ms: f64,
    /// Time per output token after the first (TPOT).
    pub tpot_ms: Percentiles,
    /// Prompt tokens that were computed, mean per request; null if the server does not report cached tokens.
    pub computed_tokens: Option<f64>,
    /// Prompt tokens that were computed although an earlier turn had them, mean per request.
    pub recomputed_tokens: Option<f64>,
    /// Recomputed tokens in percent of those that an earlier turn had; null if there are none.
    pub recomputed_percent: Option<f64>,
}

impl Row {
    /// Figures of `turns`.
    pub fn new(name: String, turns: &[&Turn]) -> Self {
        let mean = |sum: usize| sum as f64 / turns.len() as f64;
        let sum = |count: fn(&Turn) -> Option<usize>| turns.iter().map(|turn| count(turn)).sum::<Option<usize>>();
        let ttft: Vec<f64> = turns.iter().map(|turn| turn.ttft_ms).collect();
        let known: usize = turns.iter().map(|turn| turn.known_tokens).sum();
        let recomputed = sum(Turn::recomputed);
        Self {
            name,
            requests: turns.len(),
            prompt_tokens: mean(turns.iter().map(|turn| turn.prompt_tokens).sum()),
            ttft_max_ms: ttft.iter().copied().fold(f64::NAN, f64::max),
            ttft_ms: Percentiles::new(ttft),
            tpot_ms: Percentiles::new(turns.iter().filter_map(|turn| turn.tpot_ms).collect()),
            computed_tokens: sum(Turn::computed).map(mean),
            recomputed_tokens: recomputed.map(mean),
            recomputed_percent: recomputed.filter(|_| known > 0).map(|n| 100.0 * n as f64 / known as f64),
        }
    }

    fn write(&self, out: &mut String) {
        let (ttft, known) = (self.ttft_ms, self.computed_tokens.is_some());
        let tokens = |count: Option<f64>| count.map_or("n/a".into(), |count| number(count, 0));
        let percent = match self.recomputed_percent {
            None if known => "-".into(),
            percent => percent.map_or("n/a".into(), |percent| number(percent, 1)),
        };
        let _ = writeln!(
            out,
            "{:<16} {:>8} {:>8} |{:>8} {:>8} {:>8} |{:>8} |{:>9} {:>10} {:>6}",
            self.name,
            self.requests,
            number(self.prompt_tokens, 0),
            milliseconds(ttft.p50),
            milliseconds(ttft.p90),
            milliseconds(self.ttft_max_ms),
            milliseconds(self.tpot_ms.p50),
            tokens(self.computed_tokens),
            tokens(self.recomputed_tokens),
            percent
        );
    }
}

/// The rows of the table: the first turn of the sessions, ranges of later turns, then each turn of the sub-agents.
pub fn rows(turns: &[Turn]) -> Vec<Row> {
    let last = |is_subagent: bool| {
        let of_kind = turns.iter().filter(move |turn| turn.subagent.is_some() == is_subagent);
        of_kind.map(|turn| turn.turn + 1).max().unwrap_or(0)
    };
    let (main, sub) = (last(false), last(true));
    let width = main.saturating_sub(1).div_ceil(MAX_ROWS).max(1);
    let later = (1..main).step_by(width).map(|first| (first, (first + width).min(main)));
    let mains = (0..main.min(1)).map(|first| (first, 1)).chain(later).map(|range| (false, range));
    let subs = (0..sub).map(|turn| (true, (turn, turn + 1)));
    let row = |(is_subagent, (first, end)): (bool, (usize, usize))| {
        let is_in = |turn: &&Turn| turn.subagent.is_some() == is_subagent && (first..end).contains(&turn.turn);
        let kind = if is_subagent { "sub-agent turn" } else { "turn" };
        let name = if end == first + 1 { format!("{kind} {end}") } else { format!("{kind}s {}-{end}", first + 1) };
        Row::new(name, &turns.iter().filter(is_in).collect::<Vec<_>>())
    };
    mains.chain(subs).map(row).collect()
}

impl Report {
    /// The report as a table.
    pub fn table(&self) -> String {
        let mut out = format!("{} at {}\n", self.model, self.target);
        let _ = writeln!(
            out,
            "{:<16} {:>8} {:>8} |{:^26} |{:>8} |{:^27}\n\
             {:<16} {:>8} {:>8} |{:>8} {:>8} {:>8} |{:>8} |{:>9} {:>10} {:>6}",
            "",
            "",
            "prompt",
            "TTFT ms",
            "TPOT ms",
            "prompt tokens",
            "",
            "requests",
            "tokens",
            "p50",
            "p90",
            "max",
            "p50",
            "computed",
            "recomputed",
            "%"
        );
        self.rows.iter().chain([&self.total]).for_each(|row| row.write(&mut out));
        out + &self.notes()
    }

    fn notes(&self) -> String {
        let (sessions, subagents) = (plural(self.sessions, "session"), plural(self.subagents, "sub-agent"));
        let mut out = format!(
            "{sessions} of {} turns, {subagents} each; {} s, {} output tok/s. recomputed: prompt tokens that an \
             earlier turn had, and their percentage of these.\n",
            self.session_turns,
            number(self.wall_s, 1),
            number(self.output_tok_s, 1)
        );
        if self.failed > 0 {
            let _ = writeln!(out, "{} failed before their end", self.failed);
        }
        let _ =
            writeln!(out, "Needle: {} of {sessions} named the code word of the first tool result.", self.needles_found);
        out + &self.exactness.as_ref().map_or_else(String::new, Comparison::to_string)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(subagent: Option<usize>, turn: usize, cached_tokens: Option<usize>) -> Turn {
        let (prompt_tokens, known_tokens) = (100 * (turn + 1), 100 * turn);
        let (ttft_ms, tpot_ms) = (turn as f64, Some(2.0));
        Turn {
            session: 0,
            subagent,
            turn,
            prompt_tokens,
            output_tokens: 8,
            known_tokens,
            cached_tokens,
            ttft_ms,
            tpot_ms,
        }
    }

    #[test]
    fn long_sessions_are_shown_in_ranges_of_turns() {
        let names = |turns: &[Turn]| rows(turns).into_iter().map(|row| (row.name, row.requests)).collect::<Vec<_>>();
        let of = |name: &str, requests| (name.to_owned(), requests);
        let short: Vec<Turn> = (0..3).chain(0..2).map(|n| turn(None, n, None)).collect();
        assert_eq!(names(&short), [of("turn 1", 2), of("turn 2", 2), of("turn 3", 1)]);
        let mut long: Vec<Turn> = (0..20).map(|n| turn(None, n, None)).collect();
        long.extend((0..2).map(|n| turn(Some(1), n, None)));
        let rows = names(&long);
        assert_eq!((rows.len(), &rows[1], &rows[8]), (10, &of("turns 2-4", 3), &of("sub-agent turn 1", 1)));
        assert_eq!(rows[6], of("turns 17-19", 3));
        assert_eq!(rows.iter().map(|(_, requests)| requests).sum::<usize>(), 22);
        assert!(names(&[]).is_empty());
    }

    #[test]
    fn a_row_sums_what_was_computed() {
        let turns = [turn(None, 1, Some(80)), turn(None, 3, Some(300))];
        let row = Row::new("all".into(), &turns.iter().collect::<Vec<_>>());
        // 120 and 100 of 200 and 400 were computed; 20 and 0 of 100 and 300 again.
        assert_eq!((row.prompt_tokens, row.computed_tokens, row.recomputed_tokens), (300.0, Some(110.0), Some(10.0)));
        assert_eq!((row.recomputed_percent, row.ttft_ms.p50, row.ttft_max_ms), (Some(5.0), 2.0, 3.0));
        let mut line = String::new();
        row.write(&mut line);
        assert!(line.trim_end().ends_with("|      110         10    5.0"), "{line}");
        let mut line = String::new();
        Row::new("one".into(), &[&turn(None, 0, Some(0))]).write(&mut line);
        assert!(line.trim_end().ends_with("|      100          0      -"), "{line}");
        let mut line = String::new();
        Row::new("none".into(), &[&turns[0], &turn(None, 2, None)]).write(&mut line);
        assert!(line.trim_end().ends_with("|      n/a        n/a    n/a"), "{line}");
    }
}
