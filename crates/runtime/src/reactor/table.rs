//! A slab that completions can address by index alone: an occupant stays until the kernel is done with it, so its index
//! can't be taken over while an operation is in flight.

use holdfast_base::{Slab, Token};

pub(super) struct Table<T> {
    slab: Slab<T>,
    tokens: Vec<Token>,
}

impl<T> Table<T> {
    pub(super) fn new(capacity_max: usize) -> Table<T> {
        Table { slab: Slab::new(capacity_max), tokens: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn insert(&mut self, value: T) -> Token {
        let token = self.slab.insert(value);
        let index = index_of(token) as usize;
        if index == self.tokens.len() {
            self.tokens.push(token);
        } else {
            self.tokens[index] = token;
        }
        token
    }

    /// The occupant of `index`, which must be there.
    pub(super) fn at(&mut self, index: u32) -> &mut T {
        self.slab.get_mut(self.tokens[index as usize]).expect("an occupant stays while the kernel works for it")
    }

    pub(super) fn token_at(&self, index: u32) -> Token {
        self.tokens[index as usize]
    }

    pub(super) fn get(&self, token: Token) -> Option<&T> {
        self.slab.get(token)
    }

    pub(super) fn get_mut(&mut self, token: Token) -> Option<&mut T> {
        self.slab.get_mut(token)
    }

    pub(super) fn remove_at(&mut self, index: u32) -> T {
        self.slab.remove(self.tokens[index as usize]).expect("an occupant is removed once")
    }

    pub(super) fn tokens(&self) -> Vec<Token> {
        self.slab.tokens()
    }
}

pub(super) fn index_of(token: Token) -> u32 {
    token.0 as u32
}
