//! transformers' `{% generation %}`, which marks the assistant's text for training.

use std::borrow::Cow;

/// Replaces the tags by a condition that is always true. It renders their body, with the same control of white space.
pub(super) fn without_marks(source: &str) -> Cow<'_, str> {
    let mut rest = source;
    let mut out = String::new();
    while let Some((before, tag)) = rest.split_once("{%") {
        let Some((tag, after)) = tag.split_once("%}") else { break };
        out.push_str(before);
        out.push_str("{%");
        match unmarked(tag) {
            Some(tag) => out.push_str(&tag),
            None => out.push_str(tag),
        }
        out.push_str("%}");
        rest = after;
    }
    if out.is_empty() {
        return Cow::Borrowed(source);
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// The replacement of a mark: the tag's text between `{%` and `%}`; `None` for other tags.
fn unmarked(tag: &str) -> Option<String> {
    let inner = tag.trim_matches(['-', '+']);
    let tag_of = |name: &str| tag.replacen(inner, &format!(" {name} "), 1);
    match inner.trim() {
        "generation" => Some(tag_of("if true")),
        "endgeneration" => Some(tag_of("endif")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::dialect::environment;

    #[test]
    fn marks_disappear_and_control_white_space_as_before() {
        // Expected texts: jinja2 with transformers' AssistantTracker, trim_blocks and lstrip_blocks.
        for (source, expected) in [
            ("a{% generation %}b{% endgeneration %}c", "abc"),
            ("a\n  {% generation %}\nb\n  {% endgeneration %}\nc", "a\nb\nc"),
            ("a \n{%- generation -%}\n b \n{%- endgeneration -%}\n c", "abc"),
            ("a\n  {%+ generation +%}\nb{%+ endgeneration %}", "a\n  \nb"),
            ("{%generation%}{{ 'x' }}{%endgeneration%}", "x"),
            ("{% if true %}{%- generation %} y {% endgeneration -%}{% endif %} z", " y  z"),
            ("{{ 'generation' }} 100% {% set generation = 1 %}{{ generation }}", "generation 100% 1"),
            ("no tags", "no tags"),
            ("{% if", "{% if"),
        ] {
            let unmarked = without_marks(source);
            assert!(!unmarked.contains("endgeneration"), "{unmarked}");
            if source != "{% if" {
                assert_eq!(environment().render_str(&unmarked, ()).unwrap(), expected, "{source}");
            } else {
                assert_eq!(unmarked, expected);
            }
        }
    }
}
