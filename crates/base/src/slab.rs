//! A bounded slab: every operation in flight lives in one, and completions carry its token.

use std::fmt;

/// Names one occupant of a slab. A token outlives its occupant harmlessly: a late completion finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}.{}", self.0 as u32, self.0 >> 32)
    }
}

struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

/// Slots with generations; never holds more than its bound.
pub struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    capacity_max: usize,
}

impl<T> Slab<T> {
    pub fn new(capacity_max: usize) -> Slab<T> {
        assert!(capacity_max <= u32::MAX as usize, "a slab of {capacity_max} has more slots than tokens");
        Slab { entries: Vec::new(), free: Vec::new(), capacity_max }
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn is_full(&self) -> bool {
        self.len() == self.capacity_max
    }

    /// Puts `value` in a free slot. Callers check `is_full` first: a full slab here is a bug.
    pub fn insert(&mut self, value: T) -> Token {
        assert!(!self.is_full(), "slab over its bound of {}", self.capacity_max);
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, value: None });
            (self.entries.len() - 1) as u32
        });
        let entry = &mut self.entries[index as usize];
        assert!(entry.value.is_none(), "a free slot is empty");
        entry.value = Some(value);
        Token(u64::from(entry.generation) << 32 | u64::from(index))
    }

    fn entry(&self, token: Token) -> Option<&Entry<T>> {
        self.entries.get(token.0 as u32 as usize).filter(|e| u64::from(e.generation) == token.0 >> 32)
    }

    pub fn get(&self, token: Token) -> Option<&T> {
        self.entry(token).and_then(|e| e.value.as_ref())
    }

    pub fn get_mut(&mut self, token: Token) -> Option<&mut T> {
        let entry = self.entries.get_mut(token.0 as u32 as usize)?;
        if u64::from(entry.generation) != token.0 >> 32 {
            return None;
        }
        entry.value.as_mut()
    }

    pub fn remove(&mut self, token: Token) -> Option<T> {
        let index = token.0 as u32;
        let entry = self.entries.get_mut(index as usize)?;
        if u64::from(entry.generation) != token.0 >> 32 {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
        Some(value)
    }

    /// Occupants in slot order.
    pub fn iter(&self) -> impl Iterator<Item = (Token, &T)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(i, e)| e.value.as_ref().map(|v| (Token(u64::from(e.generation) << 32 | i as u64), v)))
    }

    pub fn tokens(&self) -> Vec<Token> {
        self.iter().map(|(t, _)| t).collect()
    }
}

impl<T: fmt::Debug> fmt::Debug for Slab<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_token_finds_nothing() {
        let mut slab = Slab::new(2);
        let a = slab.insert("a");
        assert_eq!(slab.remove(a), Some("a"));
        let b = slab.insert("b");
        assert_ne!(a, b);
        assert_eq!(slab.get(a), None);
        assert_eq!(slab.remove(a), None);
        assert_eq!(slab.get(b), Some(&"b"));
        let c = slab.insert("c");
        assert!(slab.is_full());
        assert_eq!(slab.tokens().len(), 2);
        assert_eq!(slab.get(c), Some(&"c"));
    }
}
