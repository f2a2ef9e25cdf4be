//! How a vocabulary spells what is no plain text: spaces, bytes, and the markers of the chat format.

/// What a space is in the text of a token.
pub(super) const SPACE: char = '\u{2581}';

/// The byte that `<0x1F>` spells.
pub(super) fn byte_value(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
        .then(|| u8::from_str_radix(digits, 16).ok())?
}

pub(super) fn only_character(text: &str) -> Option<char> {
    let mut characters = text.chars();
    characters.next().filter(|_| characters.next().is_none())
}

/// Markers of the chat format among the user-defined tokens, which also has plain words such as `<table>`. Control
/// tokens are markers anyway.
pub(super) fn is_marker(text: &str) -> bool {
    text.starts_with("<|") || text.ends_with("|>")
}
