//! What names and sizes can be, for all that take any.

/// Longest name of a volume, a snapshot, a host or a client.
pub const NAME_BYTES_MAX: usize = 64;

/// Sizes of volumes.
pub const SIZE_BYTES_MIN: u64 = 1 << 20;
pub const SIZE_BYTES_MAX: u64 = 1 << 50;

/// The longest time that a machine may be announced to be away, in seconds.
pub const ANNOUNCED_S_MAX: u64 = 30 * 86_400;

/// Whether it can be written in an NBD URI and in a table.
pub fn is_name(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    text.len() <= NAME_BYTES_MAX && starts_well && text.chars().all(is_plain)
}
