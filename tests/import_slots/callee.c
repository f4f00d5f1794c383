/* A library with a function that others import: the one that is hooked, and another with a function of the same name. */
int answer(void) {
    return 1;
}
